"""Dimensions as rules and torch write them: numbers, possibly negative, or several of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Number = bool | int | float | complex
Dims = int | Sequence[int] | None


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension as a non-negative number, or torch's error."""
    if not -ndim <= dim < ndim:
        torch.empty([1] * ndim, device="meta").squeeze(dim)
    return dim % ndim


def wrap_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """A `dim` argument as non-negative numbers; None and () mean all dimensions, as in torch."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % ndim if ndim else 0 for d in dims) if ndim else ()


def shape_alone(shape: int | Sequence[int]) -> Tensor:
    """A tensor of this shape without memory, on which torch makes views or raises their errors.

    Its elements are bytes: torch refuses a strided tensor of 2**63 bytes, but sparse tensors may have that many
    elements.
    """
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def one_element_but_along(shape: Sequence[int], dim: int) -> list[int]:
    """The shape with every size except that of `dim` set to 1: torch then raises its errors about `dim`."""
    return [n if d == dim % len(shape) else 1 for d, n in enumerate(shape)]


def with_leading_dims(t: Tensor, count: int) -> Tensor:
    """A view of `t` with `count` more dimensions, of size 1, in front.

    t[None] does the same, but accesses the device, which may not exist for a fake tensor.
    """
    return t.view((1,) * count + tuple(t.shape))
