"""Sparse records element by element: looked up, listed with their coordinates, and built from those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.coordinates import Coordinates, ravel, unravel
from op_registry.sparse.gather_scatter import gather
from op_registry.sparse.layout import COO, Layout
from op_registry.sparse.record import (
    NotLowered,
    Sparse,
    coalesce,
    from_coordinates,
    from_dense,
    without_block_padding,
)


def lookup(x: Dense | Sparse, places: Sequence[Tensor]) -> Dense:
    """The single elements at places given for every dimension: (n,), invalid where none is stored."""
    if isinstance(x, Dense):
        if x.ndim == 0:
            number = places[0].shape if places else (1,)
            return x.map(lambda t: t.expand(number))
        v = x.full_validity
        return Dense(gather(x.data, tuple(places)), None if v is None else gather(v, tuple(places)))
    sparse = x.pattern.ndim
    position, found = x.pattern.find(tuple(places[:sparse]))
    where = (position, *places[sparse:])
    return x.flat_with_sentinel().map(lambda t: t[where]).masked_by(as_int8(found))


def valid_elements(x: Sparse) -> tuple[Dense, Coordinates]:
    """The valid elements one after another, (n,), and the place of each in every dimension."""
    flat, places = without_block_padding(x)
    if not x.dense_sizes:
        if flat.validity is None or being_traced(flat.data):
            return flat, places
        kept = as_bool(as_int8(flat.full_validity)).nonzero()[:, 0]  # type: ignore[arg-type]
        return Dense(flat.data.index_select(0, kept)), tuple(p[kept] for p in places)
    if being_traced(flat.data):
        raise NotLowered("how many elements of dense dimensions are valid is not known while tracing")
    row, *rest = as_bool(as_int8(full_mask(flat))).nonzero(as_tuple=True)
    return Dense(flat.data[(row, *rest)]), (*(p[row] for p in places), *rest)


def valid_elements_of(x: Dense | Sparse) -> tuple[Dense, Coordinates]:
    """`listed`, of a record stored anyhow; a number is listed though it be invalid."""
    if isinstance(x, Dense) and x.ndim == 0:
        return x.map(lambda t: t.reshape(1)), ()
    return valid_elements(x if isinstance(x, Sparse) else from_dense(x, COO))


def from_elements(
    x: Sparse, flat: Dense, places: Sequence[Tensor], sizes: Sequence[int], *, summed: bool = False
) -> Any:
    """Elements at places in every dimension, with as many dense dimensions as `x` has and its layout, if there is room.

    `summed` says that several may be at one place; what is valid of them is summed.
    """
    dense = len(x.dense_sizes)
    if len(sizes) <= dense:
        raise NotLowered("no sparse dimension is left")
    layout = layout_with_room(x, len(sizes) - dense)
    if not dense:
        join = coalesce if summed else from_coordinates
        return join(layout, tuple(places), flat, sizes)
    sparse = len(sizes) - dense
    inner = list(sizes[sparse:])
    number, each = flat.shape[0], math.prod(inner)
    # Every element as a row of which it alone is valid.
    inside = torch.zeros(number, dtype=torch.int64, device=flat.device)
    for p, size in zip(places[sparse:], inner, strict=True):
        inside = inside * size + p
    at = torch.arange(number, device=flat.device) * each + inside
    data = flat.data.new_zeros(number * each).index_copy(0, at, flat.data)
    there = torch.zeros(number * each, dtype=torch.int8, device=flat.device).index_copy(0, at, as_int8(full_mask(flat)))
    rows = Dense(data.reshape(number, *inner), there.reshape(number, *inner))
    return coalesce(layout, tuple(places[:sparse]), rows, sizes[:sparse])


def layout_with_room(x: Sparse, sparse: int) -> Layout:
    """The layout of `x` (its exact sibling), if it has room for so many sparse dimensions; else COO."""
    return x.pattern.layout.with_room(sparse)


def grid_coordinates(shape: Sequence[int], device: torch.device) -> Coordinates:
    """The place of every element of a dense tensor."""
    return unravel(torch.arange(math.prod(shape), device=device), shape)


def sorted_coordinates(chosen: Tensor, places: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The places at which `chosen` is True, sorted."""
    kept = chosen.nonzero()[:, 0]
    there = [p[kept] for p in places]
    order = ravel(there, shape).argsort()
    return tuple(p[order] for p in there)
