"""Assignment by index: ``x[0, 1:] = v``.

torch writes a number with an operator of its choice, since 2.15 also with masked_fill_ and index_fill_, which never
make an element valid if the user calls them by name. torch writes a tensor with operators that assign, so we pass a
number as a tensor.

torch writes through a view if a part of the index makes one (a number, a slice, ``...``, ``None``, an integer tensor
without dimensions). Sparse storage does not allow that, because a pattern has no views. So we convert such an index to
index tensors, with which torch assigns in one operator.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced

_NUMBERS: Any = (numbers.Number, torch.SymInt, torch.SymFloat, torch.SymBool)


def as_source(value: Any, target: Tensor) -> Any:
    """Convert a number to a 0-d tensor of the target's dtype and device, or raise torch's error; else keep `value`."""
    return torch.full((), value, dtype=target.dtype, device=target.device) if isinstance(value, _NUMBERS) else value


def as_index_tensors(index: object, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...] | None:
    """Convert an index that makes a view to index tensors: one for each dimension up to the last that it restricts.

    They broadcast to the shape of ``x[index]`` without the remaining dimensions, and carry the masks of the index. The
    tuple is empty if the index restricts no dimension. None for an index of tensors alone, which makes no view, and for
    an index that does not fit `shape`, which torch then refuses.
    """
    entries = [as_entry(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    if not any(_makes_view(entry) for entry in entries):
        return None
    while entries and (entries[-1] is ... or entries[-1] == slice(None)):
        del entries[-1]
    reach = len(shape) if any(entry is ... for entry in entries) else sum(dimensions(entry) for entry in entries)
    missing = reach - sum(dimensions(entry) for entry in entries)
    if reach > len(shape) or missing < 0:
        return None
    # For each dimension the positions that the index reads, and the same index into these positions.
    places: list[Tensor] = []
    within: list[Any] = []
    for entry in entries:
        if entry is None or isinstance(entry, bool):
            within.append(entry)
            continue
        for part in [slice(None)] * missing if entry is ... else _parts(entry):
            read = _places(part, shape[len(places)], device)
            if read is None:
                return None
            places.append(read.flatten())
            within.append(_within(part, read))
    sizes = [len(read) for read in places]
    return tuple(
        read.reshape(-1, *[1] * (reach - d - 1)).expand(sizes)[tuple(within)]  # torch itself orders the dimensions
        for d, read in enumerate(places)
    )


def _parts(entry: Any) -> list[Any]:
    """Split a part of an index into one part per indexed dimension: a mask becomes the indices of its True elements."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) and entry.ndim:
        return list(entry.nonzero().unbind(1))
    return [entry]


def _places(part: Any, size: int, device: torch.device) -> Tensor | None:
    """The indices that a number, a slice or a tensor reads along a dimension; None if torch would refuse it."""
    if isinstance(part, slice):
        if not isinstance(size, int):  # in a graph
            return torch.arange(size, device=device)[part]
        start, stop, step = part.indices(size)
        return torch.arange(start, max(start, stop), step, device=device) if step > 0 else None
    if isinstance(part, Tensor):
        return part
    if not -size <= part < size:
        return None
    return torch.tensor([part], device=device)


def _within(part: Any, read: Tensor) -> Any:
    """The same part of an index, for a dimension that consists only of the positions that the part reads."""
    if isinstance(part, slice):
        return slice(None)
    if isinstance(part, Tensor) and part.ndim:
        return torch.arange(read.numel(), device=read.device).reshape(read.shape)
    return 0


def as_number(entry: object) -> object:
    """Convert an integer of another library, such as NumPy, to an int; return anything else unchanged."""
    if isinstance(entry, (Tensor, bool)) or not hasattr(entry, "__index__"):
        return entry
    try:
        return operator.index(entry)
    except TypeError:  # an array
        return entry


def as_entry(entry: object) -> Any:
    """One part of an index: a number, a slice, ``...``, None or a tensor."""
    entry = as_number(entry)
    if isinstance(entry, Tensor):
        is_number = entry.ndim == 0 and entry.dtype not in (torch.bool, torch.uint8)
        return entry.item() if is_number and not being_traced(getattr(entry, "_data", entry)) else entry
    if entry is None or entry is ... or isinstance(entry, (bool, int, slice)):
        return entry
    return torch.as_tensor(entry)


def _makes_view(entry: object) -> bool:
    if isinstance(entry, Tensor):
        return entry.ndim == 0 and not entry.dtype.is_floating_point and entry.dtype is not torch.bool
    return not isinstance(entry, bool)


def dimensions(entry: object) -> int:
    """The number of dimensions of the tensor that a part of an index consumes."""
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.ndim
    return 0 if entry is None or entry is ... or isinstance(entry, bool) else 1
