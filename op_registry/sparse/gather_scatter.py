"""Reading and writing a dense tensor at places of a pattern, by the quickest of torch's ways.

Advanced indexing reads an element at a time. Rows chosen by one index, and elements chosen by their position in
contiguous memory, are read by index_select and written by index_copy: 2–6 times quicker (`python -m benchmarks
adagrad`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced
from op_registry.sparse.coordinates import Coordinates, ravel

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def gather(data: Tensor, places: Coordinates) -> Tensor:
    """`data[places]`: what lies at n places in the first dimensions, (n, *rest)."""
    if data.dtype in SIGNED:  # torch cannot index these
        return gather(data.view(SIGNED[data.dtype]), places).view(data.dtype)
    if len(places) == 1:
        return data.index_select(0, places[0])
    if not data.is_contiguous() or 0 in data.shape:
        return data[places]
    sizes, rest = data.shape[: len(places)], data.shape[len(places) :]
    return data.view(-1, *rest).index_select(0, ravel(places, sizes))


def wide(rows: Tensor, like: Tensor | None = None) -> Tensor:
    """The same memory in elements of 16 bytes, where rows of contiguous memory are made of such; else as it is.

    index_copy moves rows an element at a time, whatever is in it: complex128 is moved in half the time of float32.
    like  a tensor that is asked whether that can be done, in place of `rows`
    """
    asked = rows if like is None else like
    each = 16 // asked.dtype.itemsize
    fits = asked.ndim > 1 and asked.shape[-1] % each == 0 and asked.storage_offset() % each == 0
    return rows.view(torch.complex128) if fits and asked.device.type == "cpu" and not being_traced(asked) else rows


def scatter_(target: Tensor, places: Coordinates, values: Tensor) -> Tensor:
    """`target[places] = values` at distinct places, in place; returns the target."""
    if target.dtype in SIGNED:
        scatter_(target.view(SIGNED[target.dtype]), places, values.view(SIGNED[target.dtype]))
        return target
    recorded = torch.is_grad_enabled() and (target.requires_grad or values.requires_grad)
    if recorded or not target.is_contiguous() or 0 in target.shape:
        return target.index_put_(places, values)
    if len(places) == 1:
        wide(target).index_copy_(0, places[0], wide(values.contiguous(), like=target))
        return target
    sizes, rest = target.shape[: len(places)], target.shape[len(places) :]
    target.view(-1, *rest).index_copy_(0, ravel(places, sizes), values)
    return target
