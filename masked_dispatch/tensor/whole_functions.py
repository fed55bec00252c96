"""Functions with rules inside them stay whole in compiled code, where those rules recognise the function that calls."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from masked_dispatch.compiler_internals import dynamo_is_loaded
from op_registry.inside import rules_inside_functions


def keep_functions_whole(version: str) -> None:
    """Tell Dynamo, once for each version of the registry; called before it traces code that a masked tensor enters.

    It keeps most functions of torch.nn.functional whole anyway, but not lp_pool3d, nor other people's.
    """
    if dynamo_is_loaded():
        _allow_in_graph(version)


@functools.lru_cache(maxsize=64)
def _allow_in_graph(version: str) -> None:
    for function in {rule.function for rule in rules_inside_functions()}:
        if not isinstance(function, ModuleType):
            torch.compiler.allow_in_graph(function)
