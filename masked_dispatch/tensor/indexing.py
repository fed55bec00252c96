"""Assignment by index to sparse storage: ``x[0, 1:] = v``.

Torch writes through a view wherever the index allows one, and a pattern has no views. So the index is converted to
index tensors, with which torch assigns in one operator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def as_index_tensors(index: object, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...] | None:
    """An index of numbers and slices, or of numbers and integer tensors, as index tensors.

    There is one for each dimension up to the last one it restricts.

    They broadcast to the shape of ``x[index]`` without the remaining dimensions. None for any other index, and for one
    that restricts no dimension: torch makes no view for those, or a view of everything.
    """
    entries = [as_number(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    if any(is_index_tensor(entry) for entry in entries):
        # torch takes numbers beside index tensors for index tensors too.
        if len(entries) > len(shape) or not all(type(entry) is int or is_index_tensor(entry) for entry in entries):
            return None
        return tuple(e if isinstance(e, Tensor) else torch.tensor(e, device=device) for e in entries)
    if any(type(entry) not in (int, slice) and entry is not ... for entry in entries) or entries.count(...) > 1:
        return None
    if ... in entries:
        ellipsis = entries.index(...)
        entries[ellipsis : ellipsis + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    while entries and entries[-1] == slice(None):
        del entries[-1]
    if not entries or len(entries) > len(shape):
        return None
    indices = [
        torch.arange(size, device=device)[entry] if isinstance(entry, slice) else torch.tensor(entry, device=device)
        for entry, size in zip(entries, shape, strict=False)
    ]
    trailing, meshed = sum(i.ndim for i in indices), []
    for index_tensor in indices:
        trailing -= index_tensor.ndim
        meshed.append(index_tensor.reshape(-1, *[1] * trailing) if index_tensor.ndim else index_tensor)
    return tuple(meshed)


def as_number(entry: object) -> object:
    """An integer of another library, such as NumPy's, as an int; anything else as it is."""
    if isinstance(entry, (Tensor, bool)) or not hasattr(entry, "__index__"):
        return entry
    try:
        return operator.index(entry)
    except TypeError:  # an array
        return entry


def is_index_tensor(entry: object) -> bool:
    """Whether this is a tensor of integers, which torch does not read as a mask."""
    return isinstance(entry, Tensor) and entry.dtype in (torch.int32, torch.int64) and entry.ndim > 0


def without_new_dimensions(index: object, value: Tensor, shape: Sequence[int]) -> tuple[object, Tensor]:
    """An index without its None entries, and a value without the dimensions that they stand for."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(entry is None for entry in entries):
        return index, value
    if any(not isinstance(as_number(entry), (int, slice)) and entry not in (None, ...) for entry in entries):
        return index, value
    before: Any = torch.empty((), device="meta").expand(tuple(shape))
    with_them = before[tuple(as_number(entry) for entry in entries)]
    kept = tuple(entry for entry in entries if entry is not None)
    return kept or ..., value.expand(with_them.shape).reshape(before[tuple(map(as_number, kept))].shape)
