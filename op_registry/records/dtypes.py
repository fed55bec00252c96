"""Functions of a dtype: identities of max and min, the dtype in which sums are accumulated, what it can be cast to."""

from __future__ import annotations

import math

import torch

from op_registry.records.dims import Number


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
    """torch.can_cast, which is an operator: devices and dispatch modes would see it, and may not have it."""
    return _kind(given) <= _kind(wanted)


def _kind(dtype: torch.dtype) -> int:
    """Kinds of dtypes in the order in which torch promotes them: bool, integers, reals, complex numbers."""
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)
