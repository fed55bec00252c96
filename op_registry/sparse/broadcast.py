"""Broadcasting sparse records: stored elements are repeated, absent ones are never visited."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.dims import shape_alone
from op_registry.sparse.coordinates import unravel
from op_registry.sparse.record import NotLowered, Sparse, from_coordinates, unpadded_elements


def with_coordinates(x: Sparse, coordinates: Sequence[Tensor], flat: Dense, sizes: Sequence[int]) -> Sparse:
    """Elements at new coordinates, in the layout of `x` if it allows that many dimensions, else in COO."""
    if not sizes:
        raise NotLowered("no sparse dimension is left")
    return from_coordinates(x.pattern.layout.with_room(len(sizes)), tuple(coordinates), flat, sizes)


def expand_sparse(x: Sparse, size: Sequence[int]) -> Sparse:
    """Like ``x.expand(size)``; NotLowered if the result is empty."""
    shape = shape_alone(x.shape).expand(list(size)).shape
    dense, new = len(x.dense_sizes), len(shape) - x.ndim
    inner = tuple(shape[len(shape) - dense :]) if dense else ()
    if inner != x.dense_sizes:
        x = x.like(x.values.map(lambda t: t.expand(*t.shape[: x.pattern.lead], *inner)))
    if tuple(shape) == tuple(x.shape):
        return x
    if 0 in shape:
        raise NotLowered("the expanded tensor is empty")
    old_sizes = (1,) * new + x.pattern.sizes
    times = [1 if n == m else n for n, m in zip(shape[: len(old_sizes)], old_sizes, strict=True)]
    return repeat_sparse(x, times, new)


def repeat_sparse(x: Sparse, times: Sequence[int], new: int) -> Sparse:
    """Repeat each sparse dimension as often as `times` says, after adding `new` dimensions of size 1 in front."""
    flat, coordinates = unpadded_elements(x)
    stored, total = coordinates[0].shape[0], math.prod(times)  # no int(): it would specialize a graph on the number
    copies = torch.arange(total, device=x.device).unsqueeze(1).expand(total, stored).reshape(-1)
    source = torch.arange(stored, device=x.device).expand(total, stored).reshape(-1)
    sizes = (1,) * new + x.pattern.sizes
    zeros = torch.zeros_like(source)
    original = [zeros] * new + [c[source] for c in coordinates]
    copy_index = unravel(copies, times)
    moved = [c + i * n for c, i, n in zip(original, copy_index, sizes, strict=True)]
    return with_coordinates(x, moved, flat.take_rows(source), [n * m for n, m in zip(sizes, times, strict=True)])
