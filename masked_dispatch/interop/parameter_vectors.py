"""Refuse a masked vector for plain parameters in torch.nn.utils.vector_to_parameters.

The function assigns ``parameter.data = part``, which torch runs in C++ without dispatch for plain parameters: they
would become tensors without memory, and reading one would crash the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import convert_parameters

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError


def give_parts(original: Callable[..., None], vec: MaskedTensor, parameters: Iterable[Tensor]) -> None:
    """Check that every parameter is masked before any write, then call torch's function."""
    parameters = list(parameters)
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, MaskedTensor):
            raise MaskedSemanticsError(
                f"vector_to_parameters of a masked vector of shape {tuple(vec.shape)}: parameter {number}, of shape "
                f"{tuple(parameter.shape)}, is plain, and `parameter.data = masked` can't give it a mask. Give it "
                "values, vec.to_tensor(fill); or make the parameters masked first, "
                "nn.Parameter(masked_tensor(parameter))."
            )
    original(vec, parameters)


def is_masked(vec: object, *_: object, **__: object) -> bool:
    return isinstance(vec, MaskedTensor)


def install() -> None:
    """The package calls this once, on import."""
    owners: Any = (convert_parameters, nn.utils)  # both export the function
    for owner in owners:
        replace(owner, "vector_to_parameters", give_parts, is_masked)
