"""Autocast queries for any device, also those without autocast (meta, out-of-tree devices), for which
torch.is_autocast_enabled and torch.autocast raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.records.dense import Dense


def autocast_on(device: torch.device) -> bool:
    """Whether autocast chooses dtypes on a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A region in which operators compute in the dtypes that they are given."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else contextlib.nullcontext()


def upcast_under_autocast(x: Tensor) -> Tensor:
    """float32 under autocast, whose policy says so for losses: for rules that compute one from other operators."""
    if x.dtype in (torch.float16, torch.bfloat16) and autocast_on(x.device):
        return x.to(torch.float32)
    return x


def result_dtype(x: Dense, parameters: Sequence[Dense | None], one_slice: Callable[[], Any]) -> torch.dtype:
    """The dtype in which torch returns the result; `one_slice` runs it, where autocast or mixed dtypes decide."""
    ordinary = x.dtype.is_floating_point and all(p is None or p.dtype is x.dtype for p in parameters)
    if ordinary and not autocast_on(x.device):
        return x.dtype
    return one_slice().dtype
