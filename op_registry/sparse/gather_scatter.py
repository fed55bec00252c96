"""Reading and writing a dense tensor at given coordinates with the fastest torch operator for the case.

Advanced indexing copies one element at a time. index_select and index_copy are 2-6 times faster, and apply to rows
selected by a single index and to elements selected by their position in contiguous memory (`python -m benchmarks
adagrad`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.records.dtypes import SIGNED
from op_registry.records.tracing import being_traced
from op_registry.sparse.coordinates import Coordinates, ravel


def gather(data: Tensor, coordinates: Coordinates) -> Tensor:
    """`data[coordinates]`: n elements or rows selected by their first dimensions, (n, *rest)."""
    if data.dtype in SIGNED:
        return gather(data.view(SIGNED[data.dtype]), coordinates).view(data.dtype)
    if len(coordinates) == 1:
        return data.index_select(0, coordinates[0])
    if not data.is_contiguous() or 0 in data.shape:
        return data[coordinates]
    sizes, rest = data.shape[: len(coordinates)], data.shape[len(coordinates) :]
    return data.view(-1, *rest).index_select(0, ravel(coordinates, sizes))


def wide(rows: Tensor, like: Tensor | None = None) -> Tensor:
    """The same memory as 16-byte elements if contiguous rows divide into them, else `rows` itself.

    index_copy moves a row element by element, so that complex128 takes half the time of float32.
    like  the tensor that decides, if not `rows`
    """
    asked = rows if like is None else like
    per_element = 16 // asked.dtype.itemsize
    divides = asked.ndim > 1 and asked.shape[-1] % per_element == 0 and asked.storage_offset() % per_element == 0
    return rows.view(torch.complex128) if divides and asked.device.type == "cpu" and not being_traced(asked) else rows


def scatter_(target: Tensor, coordinates: Coordinates, values: Tensor) -> Tensor:
    """`target[coordinates] = values` in place, for distinct coordinates; returns the target."""
    if target.dtype in SIGNED:
        scatter_(target.view(SIGNED[target.dtype]), coordinates, values.view(SIGNED[target.dtype]))
        return target
    recorded = torch.is_grad_enabled() and (target.requires_grad or values.requires_grad)
    if recorded or not target.is_contiguous() or 0 in target.shape:
        return target.index_put_(coordinates, values)
    if len(coordinates) == 1:
        wide(target).index_copy_(0, coordinates[0], wide(values.contiguous(), like=target))
        return target
    sizes, rest = target.shape[: len(coordinates)], target.shape[len(coordinates) :]
    target.view(-1, *rest).index_copy_(0, ravel(coordinates, sizes), values)
    return target
