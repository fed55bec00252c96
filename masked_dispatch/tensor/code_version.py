"""The version of this library and of the current rules, as a constant in graphs that make masked tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from masked_dispatch.compiler_internals import constant_in_graphs, guard_on, while_compiling
from masked_dispatch.tensor.cache_key import CODE_VERSION
from op_registry import registry

if TYPE_CHECKING:
    from masked_dispatch.torch_internals import ComptimeContext


def code_version() -> str:
    """The version of this library and of the current rules; every graph holds it and guards on it."""
    if torch.compiler.is_dynamo_compiling():
        while_compiling(_guard_on_code_version)
    return _code_version()


def _guard_on_code_version(context: ComptimeContext) -> None:
    guard_on(_code_version, context)


@constant_in_graphs
def _code_version() -> str:
    return CODE_VERSION + registry.version
