"""Single elements of sparse records: looking them up, listing them with their coordinates, and building records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import being_traced, gradients_may_flow
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.coordinates import Coordinates, ravel, unravel
from op_registry.sparse.gather_scatter import gather
from op_registry.sparse.layout import COO, Layout
from op_registry.sparse.record import (
    NotLowered,
    Sparse,
    coalesce,
    drop_invalid,
    from_coordinates,
    from_dense,
    to_layout,
    unpadded_elements,
    with_sparse_dims,
)


def lookup(x: Dense | Sparse, coordinates: Sequence[Tensor]) -> Dense:
    """The elements at coordinates in every dimension of a shape that `x` broadcasts to: (n,), invalid where none is
    stored.
    """
    if isinstance(x, Dense) and x.ndim == 0:
        shape = coordinates[0].shape if coordinates else (1,)
        return x.map(lambda t: t.expand(shape))
    return elements_at(x, tuple(coordinates[-x.ndim :]), repeated=False)


def elements_at(record: Dense | Sparse, coordinates: Coordinates, repeated: bool = True) -> Dense:
    """The elements at coordinates in the first dimensions, (n, …): in dimensions of size 1, which broadcast, at 0.

    repeated  whether many of them are the same, so that backward sums gradients: never in half precision
    """
    sizes = zip(coordinates, record.shape, strict=False)
    index = tuple(torch.zeros_like(c) if known_to_hold(size == 1) else c for c, size in sizes)
    if isinstance(record, Sparse):
        return record.at(index)
    validity, data = record.full_validity, record.data
    gather_dtype = accumulation_dtype(data.dtype) if repeated and gradients_may_flow(data) else data.dtype
    gathered = gather(data.to(gather_dtype), index).to(data.dtype)
    return Dense(gathered, None if validity is None else gather(validity, index))


def valid_elements(x: Sparse) -> tuple[Dense, Coordinates]:
    """The valid elements, (n,), and their coordinates in every dimension. Invalid ones remain in a traced graph."""
    flat, coordinates = unpadded_elements(x)
    if not x.dense_sizes:
        return drop_invalid(flat, coordinates)
    if being_traced(flat.data):
        raise NotLowered("the number of valid elements in dense dimensions is not known while tracing")
    row, *inner = as_bool(as_int8(full_mask(flat))).nonzero(as_tuple=True)
    return Dense(flat.data[(row, *inner)]), (*(c[row] for c in coordinates), *inner)


def valid_elements_of(x: Dense | Sparse) -> tuple[Dense, Coordinates]:
    """`valid_elements` of a record in any layout; a 0-d tensor is returned as one element even if it is invalid."""
    if isinstance(x, Dense) and x.ndim == 0:
        return x.map(lambda t: t.reshape(1)), ()
    return valid_elements(x if isinstance(x, Sparse) else from_dense(x, COO))


def from_elements(
    x: Sparse, flat: Dense, coordinates: Sequence[Tensor], sizes: Sequence[int], *, summed: bool = False
) -> Sparse:
    """A record of elements at coordinates in every dimension, with as many dense dimensions as `x` and its layout
    if that allows the number of sparse ones.

    `summed` allows duplicate coordinates, whose valid elements are summed.
    """
    sparse = len(sizes) - len(x.dense_sizes)
    if sparse <= 0:
        raise NotLowered("no sparse dimension is left")
    layout = layout_with_room(x, sparse)
    build = coalesce if summed else from_coordinates
    if not x.dense_sizes:
        return build(layout, tuple(coordinates), flat, sizes)
    # First one element each, then rows: memory for the rows of the result alone.
    elements = build(COO, tuple(coordinates), flat, sizes)
    return to_layout(with_sparse_dims(elements, sparse), layout)


def layout_with_room(x: Sparse, sparse: int) -> Layout:
    """The layout of `x` (its exact sibling) if it allows so many sparse dimensions, else COO."""
    return x.pattern.layout.with_room(sparse)


def grid_coordinates(shape: Sequence[int], device: torch.device) -> Coordinates:
    """The coordinates of every element of a dense tensor."""
    return unravel(torch.arange(math.prod(shape), device=device), shape)


def sorted_coordinates(chosen: Tensor, coordinates: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The coordinates of the elements for which `chosen` is True, in row-major order."""
    index = chosen.nonzero()[:, 0]
    selected = [c[index] for c in coordinates]
    order = ravel(selected, shape).argsort()
    return tuple(c[order] for c in selected)
