"""Dimensions and dtypes as rules and torch write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_registry.older_torch import VMAP_VIEWS_DTYPES, WHERE_TAKES_UNSIGNED
from op_registry.records.tracing import under_transform

# ----------------------------------------------------------- dimensions: numbers, possibly negative, or several of them

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


# --------------------------------------------------------------------------------------------------------------- dtypes


def lowest(dtype: torch.dtype) -> Number:
    """The identity of max: -inf, the least integer, or False."""
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """The identity of min: inf, the greatest integer, or True."""
    if dtype.is_floating_point:
        return math.inf
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's CPU and GPU kernels accumulate sums of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def can_cast(given: torch.dtype, wanted: torch.dtype) -> bool:
    """torch.can_cast without the operator, which devices and dispatch modes would see, and may not implement."""
    return _kind(given) <= _kind(wanted)


def _kind(dtype: torch.dtype) -> int:
    """Kinds of dtypes in the order in which torch promotes them: bool, integers, reals, complex numbers."""
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)


# The signed dtype with the same bits, for each unsigned dtype for which torch has few kernels.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def on_signed_bits(move: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`move(x)`, where `move` moves or adds elements and writes zeros; for SIGNED dtypes it gets signed integers.

    Sums of both have the same bits.
    """
    signed = SIGNED.get(x.dtype)
    return move(x) if signed is None else seen_as(move(seen_as(x, signed)), x.dtype)


def seen_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of integers as others of that width, or of int8 0 and 1 as bool, and back."""
    return x.to(dtype) if not VMAP_VIEWS_DTYPES and under_transform() else x.view(dtype)


def choose(condition: Tensor, x: Tensor, other: Tensor | Number) -> Tensor:
    """torch.where, also where torch has no kernel of it for unsigned dtypes: of these it chooses the bits."""
    if WHERE_TAKES_UNSIGNED or not {x.dtype, getattr(other, "dtype", None)} & SIGNED.keys():
        return torch.where(condition, x, other)
    dtype = torch.result_type(x, other)
    if not isinstance(other, Tensor):
        other = torch.full((), other, dtype=dtype, device=x.device)
    bits = SIGNED.get(dtype, dtype)
    chosen: Tensor = torch.where(condition, seen_as(x.to(dtype), bits), seen_as(other.to(dtype), bits))
    return seen_as(chosen, dtype)
