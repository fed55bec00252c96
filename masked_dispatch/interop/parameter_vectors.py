"""torch.nn.utils.vector_to_parameters: refused where it would give a plain parameter the data of a masked vector.

It assigns ``parameter.data = part``, which torch does in C++ for plain tensors and asks no one: they would be tensors
without memory, and the process would crash when one is read.
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
    """torch's own, if each parameter is masked; before any is written to."""
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
    """Called once, when the package is imported."""
    owners: Any = (convert_parameters, nn.utils)  # both have it by name
    for owner in owners:
        replace(owner, "vector_to_parameters", give_parts, is_masked)
