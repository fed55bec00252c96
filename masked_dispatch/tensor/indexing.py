"""Assignment by index to sparse storage: ``x[0, 1:] = v``.

Torch writes through a view wherever the index allows one, and a pattern has no views. So the index is converted to
index tensors, with which torch assigns in one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_index_tensors(index: object, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...] | None:
    """An index of numbers and slices as index tensors, one for each dimension up to the last one it restricts.

    They broadcast to the shape of ``x[index]`` without the remaining dimensions. None for any other index, and for one
    that restricts no dimension: torch makes no view for those, or a view of everything.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
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
