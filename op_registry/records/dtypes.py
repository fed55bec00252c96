"""Functions of a dtype: the identities of max and min, the dtype in which torch accumulates sums, allowed casts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from op_registry.older_torch import VMAP_VIEWS_DTYPES, WHERE_TAKES_UNSIGNED
from op_registry.records.dims import Number
from op_registry.records.tracing import under_transform


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
