"""Sparse records in the shapes that they broadcast to: stored elements repeated, and nothing else looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.sparse.coordinates import unravel
from op_registry.sparse.record import NotLowered, Sparse, from_coordinates, without_block_padding


def with_coordinates(x: Sparse, places: Sequence[Tensor], flat: Dense, sizes: Sequence[int]) -> Sparse:
    """Elements at new places, in the layout of `x` where that has room for them."""
    if not sizes:
        raise NotLowered("no sparse dimension is left")
    return from_coordinates(x.pattern.layout.with_room(len(sizes)), tuple(places), flat, sizes)


def expand_sparse(x: Sparse, size: Sequence[int]) -> Sparse:
    """As ``x.expand(size)``; NotLowered where nothing would be left."""
    shape = torch.empty(x.shape, device="meta").expand(list(size)).shape
    dense, new = len(x.dense_sizes), len(shape) - x.ndim
    inner = tuple(shape[len(shape) - dense :]) if dense else ()
    if inner != x.dense_sizes:
        x = x.like(x.values.map(lambda t: t.expand(*t.shape[: x.pattern.lead], *inner)))
    if tuple(shape) == tuple(x.shape):
        return x
    if 0 in shape:
        raise NotLowered("there is nothing in it")
    kept = (1,) * new + x.pattern.sizes
    return repeat_sparse(x, [1 if n == m else n for n, m in zip(shape[: len(kept)], kept, strict=True)], new)


def repeat_sparse(x: Sparse, times: Sequence[int], new: int) -> Sparse:
    """Every sparse dimension so many times over, with `new` ones in front."""
    flat, places = without_block_padding(x)
    stored, total = places[0].shape[0], math.prod(times)  # not as int: a graph would be one for this number alone
    copies = torch.arange(total, device=x.device).unsqueeze(1).expand(total, stored).reshape(-1)
    source = torch.arange(stored, device=x.device).expand(total, stored).reshape(-1)
    sizes = (1,) * new + x.pattern.sizes
    zeros = torch.zeros_like(source)
    own = [zeros] * new + [p[source] for p in places]
    which = unravel(copies, times)
    moved = [p + w * n for p, w, n in zip(own, which, sizes, strict=True)]
    return with_coordinates(x, moved, flat.take_rows(source), [n * m for n, m in zip(sizes, times, strict=True)])
