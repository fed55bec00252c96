"""Sparse records in the shapes that they broadcast to: stored elements repeated, and nothing else looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.patterns import PACKED, unraveled
from op_registry.records import Dense
from op_registry.sparse import NotLowered, Sparse, arranged, stored_valid, unblocked


def rebuilt(x: Sparse, places: Sequence[Tensor], flat: Dense, sizes: Sequence[int]) -> Sparse:
    """Elements at new places, in the layout of `x` where that has room for them."""
    if not sizes:
        raise NotLowered("no sparse dimension is left")
    fits = len(sizes) == 2 or (len(sizes) > 2 and x.pattern.layout is not PACKED)
    layout = unblocked(x.pattern.layout) if fits else torch.sparse_coo
    return arranged(layout, tuple(places), flat, sizes)


def expanded(x: Sparse, size: Sequence[int]) -> Sparse:
    """As ``x.expand(size)``; NotLowered where nothing would be left."""
    shape = torch.empty(x.shape, device="meta").expand(list(size)).shape
    dense, new = len(x.dense_sizes), len(shape) - x.ndim
    inner = tuple(shape[len(shape) - dense :]) if dense else ()
    if inner != x.dense_sizes:
        x = x.like(x.values.moved(lambda t: t.expand(*t.shape[: x.pattern.lead], *inner)))
    if tuple(shape) == tuple(x.shape):
        return x
    if 0 in shape:
        raise NotLowered("there is nothing in it")
    kept = (1,) * new + x.pattern.sizes
    return repeated(x, [1 if n == m else n for n, m in zip(shape[: len(kept)], kept, strict=True)], new)


def repeated(x: Sparse, times: Sequence[int], new: int) -> Sparse:
    """Every sparse dimension so many times over, with `new` ones in front."""
    flat, places = stored_valid(x)
    stored, total = places[0].shape[0], math.prod(times)  # not as int: a graph would be one for this number alone
    copies = torch.arange(total, device=x.device).unsqueeze(1).expand(total, stored).reshape(-1)
    source = torch.arange(stored, device=x.device).expand(total, stored).reshape(-1)
    sizes = (1,) * new + x.pattern.sizes
    zeros = torch.zeros_like(source)
    own = [zeros] * new + [p[source] for p in places]
    which = unraveled(copies, times)
    moved = [p + w * n for p, w, n in zip(own, which, sizes, strict=True)]
    return rebuilt(x, moved, flat.taken(source), [n * m for n, m in zip(sizes, times, strict=True)])
