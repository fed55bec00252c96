"""Coordinates (one index per dimension) and positions (one index into the flattened tensor), and the way between."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool

Coordinates = tuple[Tensor, ...]


def ravel(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The position of each element in the flattened tensor of `sizes`, from its coordinates: int64.

    Raises ValueError for a tensor with more elements than int64 can number (torch makes none).
    """
    if all(type(size) is int for size in sizes) and math.prod(sizes) > 2**63:
        raise ValueError(
            f"a tensor of sizes {tuple(sizes)} has {math.prod(sizes):,} elements, more than int64 can number: "
            "leave some dimensions dense, or split it"
        )
    position = coordinates[0].to(torch.int64)
    for index, size in zip(coordinates[1:], sizes[1:], strict=True):
        position = position * size + index
    return position


def unravel(positions: Tensor, sizes: Sequence[int]) -> Coordinates:
    """The coordinates of each position in a tensor of `sizes`; the inverse of :func:`ravel`."""
    coordinates = []
    for size in reversed(sizes[1:]):
        coordinates.append(positions % size)
        positions = positions // size
    return (positions, *reversed(coordinates)) if sizes else ()


def unique_keys(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """The distinct keys in ascending order, and the index of each key among them; keys are in [0, bound)."""
    if being_traced(keys) or bound > 8 * keys.shape[0] + 2**16:
        unique, inverse = keys.unique(return_inverse=True)
        return unique, inverse
    occurs = torch.zeros(bound, dtype=torch.int8, device=keys.device).index_fill_(0, keys, 1)
    return as_bool(occurs).nonzero()[:, 0], (occurs.cumsum(0, dtype=torch.int64) - 1)[keys]
