"""Assignment by index to sparse storage: ``x[0, 1:] = v``.

Torch writes through a view wherever an index can be one, and a pattern has no views. So the index is written out as
positions, by which torch assigns in one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def written_out(index: Any, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...] | None:
    """An index of numbers and slices as positions, one tensor for each dimension up to the last that it names.

    They broadcast to the shape of ``x[index]`` without the dimensions behind them. None for any other index, and for
    one that names no part of a dimension: of those torch makes no view, or one of the whole.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(type(entry) not in (int, slice) and entry is not ... for entry in entries) or entries.count(...) > 1:
        return None
    if ... in entries:
        at = entries.index(...)
        entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    while entries and entries[-1] == slice(None):
        del entries[-1]
    if not entries or len(entries) > len(shape):
        return None
    positions = [
        torch.arange(size, device=device)[entry] if isinstance(entry, slice) else torch.tensor(entry, device=device)
        for entry, size in zip(entries, shape, strict=False)
    ]
    behind, meshed = sum(p.ndim for p in positions), []
    for p in positions:
        behind -= p.ndim
        meshed.append(p.reshape(-1, *[1] * behind) if p.ndim else p)
    return tuple(meshed)
