"""What compiled graphs, and libraries whose device torch's C++ does not know, need of masked tensors."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from masked_dispatch.compiler_internals import (
    constant_in_graphs,
    dynamo_is_loaded,
    guard_on,
    keep_whole,
    register_bool_to_int8_lowering,
    while_compiling,
)
from op_registry import MaskedSemanticsError, registry
from op_registry.digests import source_digest
from op_registry.laws.inside import rules_inside_functions

if TYPE_CHECKING:
    from masked_dispatch.torch_internals import ComptimeContext


# ------------------------------------------------------------------------- the key in torch's caches of compiled graphs

# Identifies this package's sources, as the registry's version identifies the rules'.
CODE_VERSION = source_digest(str(Path(__file__).parents[1]))


def geometry(tensor: Tensor) -> tuple[str, ...]:
    """Everything about a tensor except its values, as text that does not depend on the process."""
    facts = (
        *(tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    )
    return tuple(str(fact) for fact in facts)


# ----------------------------------------------------------------------- the version of the rules, a constant in graphs


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


# ------------------------------------------------------------------------- functions that graphs record as single calls


def keep_functions_whole(version: str) -> None:
    """Tell Dynamo about these functions, once per version of the registry, when a masked tensor enters its trace.

    Dynamo keeps most functions of torch.nn.functional whole anyway, but not lp_pool3d or functions of other libraries.
    """
    if dynamo_is_loaded() and version not in _told:
        _told.add(version)
        keep_whole({rule.function for rule in rules_inside_functions() if not isinstance(rule.function, ModuleType)})


# The versions of the registry whose functions Dynamo has been told about.
_told: set[str] = set()


# ---------------------------------------------------------------------------------------------------------------- masks


def teach_inductor() -> None:
    """Register the lowering of `bytes_of` if inductor is loaded. We call this while tracing, to not import inductor."""
    register_bool_to_int8_lowering(torch.ops.masked_dispatch.bytes_of.default)


# ------------------------------------------------------------------------------------------- devices of other libraries

# By type of the data: a subclass of MaskedTensor, and the device that torch's C++ assumes for its tensors.
wrappers: dict[type, tuple[type, torch.device]] = {}


def transformed_elsewhere(tensor: Tensor) -> str:
    """The error text of a transform of masked_dispatch.functional."""
    return (
        f"the transforms of masked_dispatch.functional take no masked tensors on {tensor.device} (shape "
        f"{tuple(tensor.shape)}). Use those of the library that the device belongs to, on functions of data and mask "
        "that make the masked tensor inside, with as_masked_tensor(data, mask)."
    )


def check_stored_sparsely(values: Tensor) -> None:
    """Refuse sparse storage of such tensors, because its number of stored elements depends on data."""
    if type(values) in wrappers:
        raise MaskedSemanticsError(
            f"masked tensors on {values.device} (here of shape {tuple(values.shape)}) are only stored densely: the "
            "number of elements in sparse or packed storage depends on the mask, and each number would need another "
            "compilation. Keep x as it is, or store it on the CPU, x.cpu().to_layout(layout)."
        )
