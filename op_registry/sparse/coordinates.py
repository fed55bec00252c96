"""Coordinates and positions: where elements are, by dimension, and by one number for each element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool

Coordinates = tuple[Tensor, ...]


def ravel(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The position of each element in a tensor of `sizes`, from its coordinates: int64.

    Raises ValueError for a tensor with more elements than int64 can number (torch makes none).
    """
    if all(type(size) is int for size in sizes) and math.prod(sizes) > 2**63:
        raise ValueError(
            f"a tensor of sizes {tuple(sizes)} has {math.prod(sizes):,} places, more than int64 can number: "
            "leave some dimensions dense, or split it"
        )
    total = torch.zeros_like(places[0], dtype=torch.int64)
    for place, size in zip(places, sizes, strict=True):
        total = total * size + place
    return total


def unravel(positions: Tensor, sizes: Sequence[int]) -> Coordinates:
    """The coordinates of each position in a tensor of `sizes`; the reverse of :func:`ravel`."""
    found = []
    for size in reversed(sizes):
        found.append(positions % size)
        positions = positions // size
    return tuple(reversed(found))


def unique_keys(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """The distinct ones of keys in [0, bound), ascending, and which of them each key is."""
    if being_traced(keys) or bound > 8 * keys.shape[0] + 2**16:
        listed, which = keys.unique(return_inverse=True)
        return listed, which
    there = torch.zeros(bound, dtype=torch.int8, device=keys.device).index_fill_(0, keys, 1)
    return as_bool(there).nonzero()[:, 0], (there.cumsum(0, dtype=torch.int64) - 1)[keys]
