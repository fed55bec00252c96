"""Elements of a tensor that share a memory location: along an expanded dimension, or in overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry import MaskedSemanticsError


def one_of_each(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A view with one element per memory location along dimensions whose `strides` are 0."""
    for d in [d for d, stride in enumerate(strides) if type(stride) is int and stride == 0 and tensor.shape[d] > 1]:
        tensor = tensor.narrow(d, 0, 1)
    return tensor


def same_places(a: Tensor, b: Tensor) -> bool:
    """Whether two views of the same memory have their elements at the same locations."""
    a, b = one_of_each(a, a.stride()), one_of_each(b, b.stride())
    return a.shape == b.shape and a.storage_offset() == b.storage_offset() and _steps(a) == _steps(b)


def assign_validity(places: Tensor, validity: Tensor) -> None:
    """Write a validity to memory that has the data's strides.

    Raises MaskedSemanticsError if elements that share a location differ: a write to one leaves the others undefined.
    """
    full = validity.expand(places.shape)
    one_of_each(places, places.stride()).copy_(one_of_each(full, places.stride()))
    if may_share(places) and not torch.equal(places, full):
        raise MaskedSemanticsError(
            f"a write to a masked tensor of shape {tuple(places.shape)} and strides {places.stride()}: elements that "
            "share one place in memory have different masks, so a write to one would change the values of the "
            "others, and their validity would be unknown. Write to x.clone(), where each element has its own "
            "memory."
        )


def may_share(tensor: Tensor) -> bool:
    """Whether several elements may share a location: a stride lies within the extent of smaller strides."""
    extent = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= extent:
                return True
            extent += step * (size - 1)
    return False


def _steps(tensor: Tensor) -> list[int]:
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
