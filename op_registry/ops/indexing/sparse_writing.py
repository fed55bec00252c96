"""Writing by index on sparse storage.

Law: as for dense storage (assignment.py, scatter.py). Written elements replace the stored ones at their coordinates, or
are summed with them. An assignment that writes to one element twice has no lowering: torch does not specify the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    Coordinates,
    Dense,
    NotLowered,
    Number,
    Sparse,
    as_bool,
    as_int8,
    being_traced,
    broadcast_to,
    concat_values,
    from_elements,
    full_mask,
    grid_coordinates,
    lookup,
    ravel,
    shape_alone,
    sorted_coordinates,
    to_dense,
    unravel,
    valid_elements,
    valid_elements_of,
    valid_in_all,
    wrap_dim,
)
from op_registry.ops.indexing import assignment, scatter
from op_registry.ops.indexing import rules as indexing
from op_registry.ops.indexing.sparse import as_tensor_of, check_range, in_range, stored_values

aten = torch.ops.aten

# --------------------------------------------------------------------------------- elements replaced, elements summed


def require_eager(*records: Dense | Sparse | None) -> None:
    """NotLowered where a record is traced."""
    if any(record is not None and being_traced(stored_values(record).data) for record in records):
        raise NotLowered("while tracing it is unknown how many elements are kept")


def joined(
    own: Dense, own_coordinates: Coordinates, kept: Tensor, flat: Dense, coordinates: Sequence[Tensor]
) -> tuple[Dense, list[Tensor]]:
    """The elements of `x` at the positions `kept`, and the new elements, with their coordinates."""
    values = concat_values([own.take_rows(kept), Dense(flat.data.to(own.dtype), flat.validity)])
    return values, [torch.cat([o[kept], c]) for o, c in zip(own_coordinates, coordinates, strict=True)]


def replaced(x: Sparse, overwritten: Tensor, flat: Dense, coordinates: Coordinates) -> Any:
    """`x` with elements at distinct `coordinates` written; `overwritten` are their offsets in a dense `x`, sorted."""
    own, own_coordinates = valid_elements(x)
    offsets = ravel(own_coordinates, x.shape)
    bounded = torch.cat([overwritten, overwritten.new_full((1,), torch.iinfo(torch.int64).max)])
    kept = (bounded[torch.searchsorted(bounded, offsets)] != offsets).nonzero()[:, 0]
    values, new_coordinates = joined(own, own_coordinates, kept, flat, coordinates)
    if values.validity is not None:
        valid = as_bool(as_int8(values.full_validity)).nonzero()[:, 0]  # type: ignore[arg-type]
        values, new_coordinates = Dense(values.data[valid]), [c[valid] for c in new_coordinates]
    return from_elements(x, values, new_coordinates, x.shape)


def summed(x: Sparse, flat: Dense, coordinates: Sequence[Tensor]) -> Any:
    """The sum of `x` and of elements at coordinates, which may repeat."""
    own, own_coordinates = valid_elements(x)
    values = concat_values([own, flat])
    all_coordinates = [torch.cat(pair) for pair in zip(own_coordinates, coordinates, strict=True)]
    return from_elements(x, values, all_coordinates, x.shape, summed=True)


def written(x: Sparse, flat: Dense, coordinates: Coordinates, accumulate: bool) -> Any:
    """`x` with elements written at coordinates, or added to the elements there."""
    if accumulate:
        return summed(x, flat, coordinates)
    overwritten = ravel(coordinates, x.shape).unique()
    if overwritten.shape != coordinates[0].shape:
        raise NotLowered("it writes to one element twice")
    return replaced(x, overwritten, flat, coordinates)


# ---------------------------------------------------------------------------------------- one index along a dimension


def written_rows(
    x: Dense | Sparse, dim: int, index: Dense | Sparse, source: Dense | Sparse
) -> tuple[Sparse, Tensor, Dense, list[Tensor]]:
    """`x`, the valid indices into `dim`, and the elements of `source` with the coordinates that they are written to."""
    require_eager(x, index, source)
    if not isinstance(x, Sparse) or source.ndim != x.ndim or index.ndim > 1:
        raise NotLowered("the target is stored densely, or its operands have different numbers of dimensions")
    axis = wrap_dim(dim, x.ndim)
    flat_index = to_dense(index).map(torch.flatten)
    aten.index_select(as_tensor_of(x.shape, x), dim, flat_index.filled(0))  # raises where one is out of range
    expected = [len(flat_index.data) if d == axis else n for d, n in enumerate(x.shape)]
    if list(source.shape) != expected or source.dtype is not x.dtype:
        raise NotLowered("its operands do not fit in shape or dtype")
    flat, coordinates = valid_elements_of(source)
    rows, valid = flat_index.filled(0).to(torch.int64), flat_index.valid
    if valid is None:
        return x, rows, flat, [rows[c] if d == axis else c for d, c in enumerate(coordinates)]
    kept = valid[coordinates[axis]].nonzero()[:, 0]
    flat, coordinates = flat.take_rows(kept), tuple(c[kept] for c in coordinates)
    return x, rows[valid], flat, [rows[c] if d == axis else c for d, c in enumerate(coordinates)]


@assignment.index_copy.lowering(Sparse)
def index_copy(op: OpOverload, x: Dense | Sparse, dim: int, index: Dense | Sparse, source: Dense | Sparse) -> Any:
    x, rows, flat, coordinates = written_rows(x, dim, index, source)
    if rows.unique().shape != rows.shape:
        raise NotLowered("an index is written to twice")
    axis = wrap_dim(dim, x.ndim)
    own, own_coordinates = valid_elements(x)
    not_written = torch.ones(x.shape[axis], dtype=torch.bool, device=x.device).index_fill(0, rows, False)
    kept = not_written[own_coordinates[axis]].nonzero()[:, 0]
    return from_elements(x, *joined(own, own_coordinates, kept, flat, coordinates), x.shape)


@scatter.index_add.lowering(Sparse)
def index_add(
    op: OpOverload, x: Dense | Sparse, dim: int, index: Dense | Sparse, source: Dense | Sparse, *, alpha: Number = 1
) -> Any:
    x, _, flat, coordinates = written_rows(x, dim, index, source)
    return summed(x, flat if alpha == 1 else Dense(alpha * flat.filled(0), flat.validity), coordinates)


@assignment.index_fill.lowering(Sparse)
def index_fill(op: OpOverload, x: Dense | Sparse, dim: int, index: Dense | Sparse, value: Number | Dense) -> Sparse:
    if not isinstance(x, Sparse) or index.ndim > 1:
        raise NotLowered("the target is stored densely")
    axis, flat_index = wrap_dim(dim, x.ndim), to_dense(index).map(torch.flatten)
    if axis >= x.pattern.ndim:
        values_dim = axis - x.pattern.ndim + x.pattern.lead
        return x.like(assignment.index_fill.run(op, x.values, values_dim, flat_index, value))
    none = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
    aten.index_fill(none, 0, flat_index.filled(0), 0)  # raises where one is out of range
    rows, valid = in_range(flat_index.filled(0), x.shape[axis]), flat_index.valid
    filled_rows = none.index_fill(0, rows if valid is None else rows[valid], True)
    filled = filled_rows[x.pattern.fold(x.pattern.coordinates()[axis])]
    filled = filled.reshape(filled.shape + (1,) * (x.values.ndim - filled.ndim))
    if not isinstance(value, Dense):
        return x.like(x.values.like(torch.where(filled, torch.full_like(x.values.data, value), x.values.data)))
    result = Dense(torch.where(filled, value.data.to(x.dtype), x.values.data), x.values.validity)
    if value.validity is None:
        return x.like(result)
    unaffected = as_int8(~filled) | as_int8(value.validity)
    return x.like(result.masked_by(unaffected.expand(result.shape)))


# ----------------------------------------------------------------------------------------------- a view of the target


@assignment.select_scatter.lowering(Sparse)
def select_scatter(op: OpOverload, x: Dense | Sparse, source: Dense | Sparse, *args: Any, **kwargs: Any) -> Any:
    require_eager(x, source)
    op(shape_alone(x.shape), shape_alone(source.shape), *args, **kwargs)  # raises torch's errors
    if not isinstance(x, Sparse):
        return assignment.select_scatter.run(op, x, to_dense(source), *args, **kwargs)  # the result is dense anyway
    ways: dict[str, Callable[..., tuple[Tensor, list[Tensor]]]] = {
        "select_scatter": _written_by_select,
        "slice_scatter": _written_by_slice,
        "diagonal_scatter": _written_by_diagonal,
    }
    flat, source_coordinates = valid_elements_of(source)
    own, own_coordinates = valid_elements(x)
    way = ways[op._schema.name.partition("::")[2]]
    in_view, coordinates = way(x, own_coordinates, source_coordinates, *args, **kwargs)
    kept = (~in_view).nonzero()[:, 0]
    return from_elements(x, *joined(own, own_coordinates, kept, flat, coordinates), x.shape)


# Each returns which elements of `x` are in the view, and the coordinates in `x` of the source's elements.


def _written_by_select(
    x: Sparse, own: Coordinates, source: Coordinates, dim: int, index: int
) -> tuple[Tensor, list[Tensor]]:
    dim = wrap_dim(dim, x.ndim)
    index = index % x.shape[dim]
    new = torch.full((source[0].shape[0] if source else 1,), index, device=x.device)
    return own[dim] == index, [*source[:dim], new, *source[dim:]]


def _written_by_slice(
    x: Sparse,
    own: Coordinates,
    source: Coordinates,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    dim = wrap_dim(dim, x.ndim)
    indices = range(x.shape[dim])[start:end:step]
    first = indices[0] if len(indices) else 0
    in_view = (own[dim] >= first) & (own[dim] < first + len(indices) * step) & ((own[dim] - first) % step == 0)
    return in_view, [c * step + first if d == dim else c for d, c in enumerate(source)]


def _written_by_diagonal(
    x: Sparse, own: Coordinates, source: Coordinates, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> tuple[Tensor, list[Tensor]]:
    a, b = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    diagonal, others = source[-1], iter(source[:-1])
    moved = {a: diagonal - min(offset, 0), b: diagonal + max(offset, 0)}
    return own[b] - own[a] == offset, [moved[d] if d in moved else next(others) for d in range(x.ndim)]


# ----------------------------------------------------------------------------------------- an index for every element


def contributions(
    x: Dense | Sparse, dim: int, index: Dense | Sparse, src: Dense | Sparse
) -> tuple[Dense, list[Tensor]]:
    """The elements that a scatter writes, and their coordinates; only those with a valid index."""
    require_eager(x, index, src)
    if x.ndim == 0 or index.ndim != x.ndim or src.ndim != x.ndim:
        raise NotLowered("its operands have different numbers of dimensions")
    axis = wrap_dim(dim, x.ndim)
    for d in range(x.ndim):
        if index.shape[d] > src.shape[d] or (d != axis and index.shape[d] > x.shape[d]):
            raise NotLowered("its operands do not fit in shape")
    flat, coordinates = valid_elements_of(index)
    rows = flat.data.to(torch.int64)
    aten.gather(as_tensor_of((x.shape[axis],), x), 0, rows)  # raises where one is out of range
    return lookup(src, coordinates), [rows if d == axis else c for d, c in enumerate(coordinates)]


@scatter.scatter_add.lowering(Sparse)
def scatter_add(op: OpOverload, x: Dense | Sparse, dim: int, index: Dense | Sparse, src: Dense | Sparse) -> Any:
    flat, coordinates = contributions(x, dim, index, src)
    if x.dtype is not src.dtype:
        raise NotLowered("its operands have different dtypes")
    if isinstance(x, Sparse):
        return summed(x, flat, coordinates)
    offsets = ravel(coordinates, x.shape)
    total = x.filled(0).reshape(-1).index_add(0, offsets, flat.filled(0)).reshape(x.shape)
    if x.validity is None:
        return Dense(total)
    number = full_mask(x).to(torch.int32).reshape(-1).index_add(0, offsets, full_mask(flat).to(torch.int32))
    return Dense(total, as_int8(number > 0).reshape(x.shape))


@scatter.scatter.lowering(Sparse)
def scatter_src(op: OpOverload, x: Dense | Sparse, dim: int, index: Dense | Sparse, src: Dense | Sparse) -> Any:
    flat, coordinates = contributions(x, dim, index, src)
    if not isinstance(x, Sparse) or x.dtype is not src.dtype:
        raise NotLowered("the target is stored densely, or its operands have different dtypes")
    return written(x, flat, tuple(coordinates), accumulate=False)


@assignment.index_put.lowering(Sparse)
def index_put(
    op: OpOverload,
    x: Dense | Sparse,
    indices: Sequence[Dense | Sparse | None],
    values: Dense | Sparse,
    accumulate: bool = False,
) -> Any:
    require_eager(x, values, *indices)
    used = [i for i in indices if i is not None]
    if not isinstance(x, Sparse) or x.dtype is not values.dtype:
        raise NotLowered("the target is stored densely, or its operands have different dtypes")
    # Values are no larger than the indices, so they may be dense.
    if len(used) == 1 and indexing.is_boolean(used[0]) and used[0].shape == x.shape:
        flat_mask, coordinates = valid_elements_of(used[0])
        coordinates, flat = sorted_coordinates(flat_mask.filled(0), coordinates, x.shape), to_dense(values)
    elif len(used) == len(indices) and not any(indexing.is_boolean(i) for i in used):
        flat, coordinates = _writes_by_index(x, [to_dense(i) for i in used], to_dense(values))
    else:
        raise NotLowered("it has a mask among other indices, or an index behind a dimension without one")
    return written(x, flat.map(lambda t: t.expand(coordinates[0].shape)), coordinates, accumulate)


def _writes_by_index(x: Sparse, indices: Sequence[Dense], values: Dense) -> tuple[Dense, Coordinates]:
    """The single elements that ``x[indices] = values`` writes, and their coordinates; only those with valid indices."""
    for d, index in enumerate(indices):
        check_range(x, d, index)
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    whole = (*shape, *x.shape[len(indices) :])
    grid = grid_coordinates(whole, x.device)
    if shape:
        offsets = ravel(grid[: len(shape)], shape)
    else:  # indices are single elements: all values share one offset
        offsets = torch.zeros(math.prod(whole), dtype=torch.int64, device=x.device)
    flat_indices = [index.map(lambda t: t.expand(shape).reshape(-1)[offsets]) for index in indices]
    rows = (in_range(index.filled(0), size) for index, size in zip(flat_indices, x.shape, strict=False))
    coordinates: Coordinates = (*rows, *grid[len(shape) :])
    flat = values.map(lambda t: t.expand(whole).reshape(-1))
    valid = valid_in_all(*flat_indices)
    if valid is None:
        return flat, coordinates
    kept = as_bool(valid).nonzero()[:, 0]
    return flat.take_rows(kept), tuple(c[kept] for c in coordinates)


@assignment.put.lowering(Sparse)
def put(
    op: OpOverload, x: Dense | Sparse, index: Dense | Sparse, source: Dense | Sparse, accumulate: bool = False
) -> Any:
    require_eager(x, index, source)
    if not isinstance(x, Sparse) or x.dtype is not source.dtype or math.prod(x.shape) == 0:
        raise NotLowered("the target is stored densely or empty, or its operands have different dtypes")
    flat_index, values = to_dense(index).map(torch.flatten), to_dense(source).map(torch.flatten)
    if flat_index.shape != values.shape:
        raise NotLowered("there is not one value for each index")
    aten.take(as_tensor_of(x.shape, x), flat_index.filled(0))  # raises where one is out of range
    offsets = in_range(flat_index.filled(0), math.prod(x.shape))
    if flat_index.valid is not None:
        kept = flat_index.valid.nonzero()[:, 0]
        offsets, values = offsets[kept], values.take_rows(kept)
    return written(x, values, unravel(offsets, x.shape), accumulate)


# -------------------------------------------------------------------------------------------------- all of the target


@assignment.copy.lowering(Sparse)
def copy(op: OpOverload, x: Dense | Sparse, source: Dense | Sparse, non_blocking: bool = False) -> Sparse:
    if not isinstance(source, Sparse):
        raise NotLowered("the source is stored densely, and so is the result")
    expanded: Sparse = broadcast_to(source, x.shape)
    return expanded.like(expanded.values.like(expanded.values.data.to(x.device, x.dtype, copy=True)))
