"""Reading and writing by index on sparse storage.

Law: as for dense storage (rules.py, assignment.py, scatter.py). Where every element of the result has an index of its
own, elements are looked up among the stored ones, and the result has the storage of its index. A single index along a
dimension is joined with the stored coordinates, so that elements that are not stored are never visited. Written
elements replace the stored ones at their coordinates, or are summed with them. An assignment that writes to one element
twice has no lowering: torch does not specify the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import (
    Bound,
    Coordinates,
    Dense,
    NotLowered,
    Sparse,
    align_to,
    as_bool,
    as_int8,
    being_traced,
    broadcast_to,
    call,
    first_of,
    on_call,
    packet_name,
    raise_error_of_torch,
    ravel,
    to_dense,
    unravel,
    valid_in_all,
    wrap_dim,
)
from op_registry.ops.indexing import assignment, embedding, scatter
from op_registry.ops.indexing import rules as indexing
from op_registry.records.layout import full_mask
from op_registry.sparse.convert import (
    concat_values,
    drop_invalid,
    from_elements,
    grid_coordinates,
    lookup,
    sorted_coordinates,
    unpadded_elements,
    valid_elements,
    valid_elements_of,
    with_coordinates,
)
from op_registry.sparse.on_values import map_dense_dim

aten = torch.ops.aten


# -------------------------------------------------------------------------------------------------------------- reading


@on_call(sparse="indices", dense="weight")
def embedding_of_rows(c: Bound) -> Sparse:
    """A row of the weight for each stored index."""
    return c.indices.like(c.run_with({"indices": c.indices.values}))


def stored_values(record: Dense | Sparse) -> Dense:
    """The stored values of a sparse record; a dense one itself."""
    return record.values if isinstance(record, Sparse) else record


def as_tensor_of(shape: Sequence[int], like: Dense | Sparse, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of this shape without memory, against which torch checks an index."""
    return torch.zeros((), dtype=dtype or torch.int8, device=like.device).expand(tuple(shape))


def in_range(index: Tensor, size: int) -> Tensor:
    """Indices as non-negative int64."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


def check_range(x: Dense | Sparse, dim: int, index: Dense | Sparse) -> None:
    """Raise torch's error if a valid index is out of range."""
    aten.index(as_tensor_of((x.shape[dim],), x), [stored_values(index).filled(0)])


# ----------------------------------------------------------------------------------------- an index for every element


@indexing.gather.lowering(Sparse)
@on_call(one_ndim="self, index", no_dense_dims="index", only=(("sparse_grad", False),))
def gather(c: Bound) -> Dense | Sparse:
    x, dim, index = c.self, c.dim, c.index
    axis = wrap_dim(dim, x.ndim)
    safe = stored_values(index).filled(0)
    if isinstance(index, Sparse):
        flat, coordinates = index.flat, index.pattern.coordinates()
        aten.gather(as_tensor_of((x.shape[axis],), x), 0, flat.filled(0))  # raises where one is out of range
        aten.gather(as_tensor_of(x.shape, x), dim, as_tensor_of(index.shape, x, safe.dtype))  # torch's other errors
        read = [flat.filled(0).to(torch.int64) if d == axis else c for d, c in enumerate(coordinates)]
        return index.folded(lookup(x, read).masked_by(flat.full_validity))
    aten.gather(as_tensor_of(x.shape, x), dim, safe)  # raises torch's errors
    read = [
        safe.reshape(-1).to(torch.int64) if d == axis else c
        for d, c in enumerate(grid_coordinates(index.shape, x.device))
    ]
    return lookup(x, read).map(lambda t: t.reshape(index.shape)).masked_by(index.full_validity)


@indexing.take.lowering(Sparse)
@on_call(elements="self")
def take(c: Bound) -> Dense | Sparse:
    x, index, stored = c.self, c.index, stored_values(c.index)
    aten.take(as_tensor_of(x.shape, x), stored.filled(0))  # raises where one is out of range
    offsets = in_range(stored.filled(0).reshape(-1), math.prod(x.shape))
    elements = lookup(x, unravel(offsets, x.shape)).map(lambda t: t.reshape(stored.shape))
    elements = elements.masked_by(stored.full_validity)
    return index.like(elements) if isinstance(index, Sparse) else elements


@indexing.index.lowering(Sparse)
@on_call
def index(c: Bound) -> Any:
    x, indices = c.self, c.indices
    dims = [d for d, i in enumerate(indices) if i is not None]
    used = [i for i in indices if i is not None]
    if any(indexing.is_boolean(i) for i in used):
        return _by_mask(x, dims[0], used)
    if len(used) == 1 and isinstance(x, Sparse) and isinstance(used[0], Dense):
        return _by_one_index(x, dims[0], used[0])
    if dims != list(range(x.ndim)):
        raise NotLowered("some dimensions have an index and some have none")
    for d, i in enumerate(used):
        check_range(x, d, i)
    shape = torch.broadcast_shapes(*(i.shape for i in used))
    lead = next((i for i in used if isinstance(i, Sparse) and i.shape == shape), None)
    if lead is not None:
        aligned, result_shape = [align_to(i, lead) for i in used], lead.values.shape
    else:
        aligned, result_shape = [i for i in used if isinstance(i, Dense)], shape
        if len(aligned) < len(used):
            raise NotLowered("no sparse index has the shape of the result")
    flat_indices = [i.map(lambda t: t.expand(result_shape).reshape(-1)) for i in aligned]
    elements = lookup(x, [in_range(i.filled(0), size) for i, size in zip(flat_indices, x.shape, strict=True)])
    for i in flat_indices:
        elements = elements.masked_by(i.validity)
    elements = elements.map(lambda t: t.reshape(result_shape))
    return elements if lead is None else lead.like(elements)


def _by_one_index(x: Sparse, dim: int, index: Dense) -> Any:
    """``x[:, …, index]``: an index of any shape along one dimension."""
    check_range(x, dim, index)
    flat = index.map(lambda t: t.reshape(-1))
    selected = index_select(x, dim, Dense(in_range(flat.filled(0), x.shape[dim]), flat.validity))
    if index.ndim == 1:
        return selected
    return call(aten.view.default, selected, (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _by_mask(x: Dense | Sparse, dim: int, used: Sequence[Dense | Sparse]) -> Any:
    """``x[mask]``, and ``x[:, ..., mask]``: a mask along one dimension."""
    mask = used[0]
    along = isinstance(x, Sparse) and mask.shape == x.shape[dim : dim + 1] and mask.dtype is torch.bool
    fits = len(used) == 1 and (along or mask.shape == x.shape)
    if not fits or being_traced(stored_values(mask).data):
        raise NotLowered("it has a mask among other indices or of another shape, or how much it selects is unknown")
    if mask.shape != x.shape:
        return index_select(x, dim, Dense(to_dense(mask).filled(False).nonzero()[:, 0]))  # type: ignore[arg-type]
    flat, coordinates = valid_elements_of(mask)
    return lookup(x, sorted_coordinates(flat.filled(0), coordinates, x.shape))


@on_call(dense="self")
def index_select_of_dense(c: Bound) -> Any:
    return c.with_(index=to_dense(c.index)).run()  # the index is as long as the result


@on_call(sparse="weight", dense="indices", only=(("scale_grad_by_freq", False),))
def embedding_of_sparse(c: Bound) -> Any:
    weight, indices, padding_idx = c.weight, c.indices, c.padding_idx
    aten.embedding(as_tensor_of(weight.shape, weight, torch.float32), indices.filled(0))  # raises torch's errors
    if 0 <= padding_idx < weight.shape[0]:
        rows = weight.pattern.fold(weight.pattern.coordinates()[0])
        rows = rows.reshape(rows.shape + (1,) * (weight.values.ndim - rows.ndim))
        data = weight.values.data
        weight = weight.like(weight.values.like(torch.where(rows == padding_idx, data.detach(), data)))
    selected = index_select(weight, 0, indices.map(lambda t: t.reshape(-1)))
    return call(aten.view.default, selected, (*indices.shape, weight.shape[1]))


@indexing.masked_select.lowering(Sparse)
@on_call(eager=True)
def masked_select(c: Bound) -> Dense:
    x, mask = c.self, c.mask
    aten.masked_select(as_tensor_of((), x), as_tensor_of((), mask, mask.dtype))  # raises torch's error for its dtype
    return lookup(x, true_coordinates(mask, torch.broadcast_shapes(x.shape, mask.shape)))


def true_coordinates(mask: Dense | Sparse, shape: Sequence[int]) -> Coordinates:
    """Where a mask, broadcast to `shape`, is valid and True, in row-major order."""
    if isinstance(mask, Dense):
        return mask.map(lambda t: t.expand(shape)).filled(False).nonzero(as_tuple=True)
    flat, coordinates = valid_elements(broadcast_to(mask, shape))
    return sorted_coordinates(flat.filled(False), coordinates, shape)


# ---------------------------------------------------------------------------------------- one index along a dimension


@on_call(sparse="self")
def index_select_of_sparse(c: Bound) -> Sparse:
    """`index_select` from a sparse tensor."""
    return index_select(c.self, c.dim, c.index)


def index_select(x: Sparse, dim: int, index: Dense | Sparse) -> Sparse:
    axis = wrap_dim(dim, x.ndim)
    index = to_dense(index)  # as long as the result
    if axis >= x.pattern.ndim:
        return _index_select_dense_dim(x, axis, index)
    aten.index_select(as_tensor_of((x.shape[axis],), x), 0, index.filled(0))  # raises torch's errors
    safe = index.filled(0).reshape(-1).to(torch.int64)
    flat, coordinates = unpadded_elements(x)
    # We join the index with the stored coordinates, and sort these first.
    ordered, order = coordinates[axis].sort(stable=True)
    starts = torch.searchsorted(ordered, safe)
    matches = torch.searchsorted(ordered, safe, right=True) - starts
    if index.validity is not None:
        matches = matches * index.validity.reshape(-1)  # an invalid index selects nothing that is valid
    selected_by = torch.repeat_interleave(torch.arange(len(safe), device=x.device), matches)
    rank = torch.arange(selected_by.shape[0], device=x.device) - (matches.cumsum(0) - matches)[selected_by]
    source = order[starts[selected_by] + rank]
    moved = [selected_by if d == axis else c[source] for d, c in enumerate(coordinates)]
    sizes = [len(safe) if d == axis else n for d, n in enumerate(x.pattern.sizes)]
    return with_coordinates(x, moved, flat.take_rows(source), sizes)


def _index_select_dense_dim(x: Sparse, dim: int, index: Dense) -> Sparse:
    if index.validity is None:
        return map_dense_dim(x, dim, lambda t, d: t.index_select(d, index.data))
    return x.like(indexing.index_select.run(x.values, dim - x.pattern.ndim + x.pattern.lead, index))


# Try a dense table first, whose index may be sparse, then a sparse table.
indexing.index_select.lowering(Sparse)(first_of(index_select_of_dense, index_select_of_sparse))
embedding.embedding.lowering(Sparse)(first_of(embedding_of_rows, embedding_of_sparse))


# --------------------------------------------------------------------------------------------- writing and accumulating

TWICE = "it writes to one element twice"


# --------------------------------------------------------------------------------- elements replaced, elements summed


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
    values, new_coordinates = drop_invalid(*joined(own, own_coordinates, kept, flat, coordinates))
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
        raise NotLowered(TWICE)
    return replaced(x, overwritten, flat, coordinates)


# ---------------------------------------------------------------------------------------- one index along a dimension

WRITES_ROWS = on_call(sparse="self", one_dtype="self, source", one_ndim="self, source", eager=True)


def written_rows(c: Bound) -> tuple[Sparse, Tensor, Dense, list[Tensor]]:
    """`x`, the valid indices into `dim`, and the elements of `source` with the coordinates that they are written to."""
    x, dim, source = c.self, c.dim, c.source
    raise_error_of_torch(c)
    axis = wrap_dim(dim, x.ndim)
    flat_index = to_dense(c.index).map(torch.flatten)
    check_range(x, axis, flat_index)
    flat, coordinates = valid_elements_of(source)
    rows, valid = flat_index.filled(0).to(torch.int64), flat_index.valid
    if valid is None:
        return x, rows, flat, [rows[c] if d == axis else c for d, c in enumerate(coordinates)]
    kept = valid[coordinates[axis]].nonzero()[:, 0]
    flat, coordinates = flat.take_rows(kept), tuple(c[kept] for c in coordinates)
    return x, rows[valid], flat, [rows[c] if d == axis else c for d, c in enumerate(coordinates)]


@assignment.index_copy.lowering(Sparse)
@WRITES_ROWS
def index_copy(c: Bound) -> Any:
    x, rows, flat, coordinates = written_rows(c)
    if rows.unique().shape != rows.shape:
        raise NotLowered(TWICE)
    axis = wrap_dim(c.dim, x.ndim)
    own, own_coordinates = valid_elements(x)
    not_written = torch.ones(x.shape[axis], dtype=torch.bool, device=x.device).index_fill(0, rows, False)
    kept = not_written[own_coordinates[axis]].nonzero()[:, 0]
    return from_elements(x, *joined(own, own_coordinates, kept, flat, coordinates), x.shape)


@scatter.index_add.lowering(Sparse)
@WRITES_ROWS
def index_add(c: Bound) -> Any:
    x, _, flat, coordinates = written_rows(c)
    return summed(x, flat if c.alpha == 1 else Dense(c.alpha * flat.filled(0), flat.validity), coordinates)


@assignment.index_fill.lowering(Sparse)
@on_call(sparse="self")
def index_fill(c: Bound) -> Sparse:
    x, value, index = c.self, c.value, to_dense(c.index)
    axis, flat_index = wrap_dim(c.dim, x.ndim), index.map(torch.flatten)
    none = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
    aten.index_fill(none, 0, index.filled(0), 0)  # raises torch's errors
    if axis >= x.pattern.ndim:
        values_dim = axis - x.pattern.ndim + x.pattern.lead
        return x.like(c.with_(self=x.values, dim=values_dim, index=flat_index).run())
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
@assignment.slice_scatter.lowering(Sparse)
@assignment.diagonal_scatter.lowering(Sparse)
@on_call(eager=True)
def select_scatter(c: Bound) -> Any:
    x, source = c.self, c.src
    raise_error_of_torch(c)
    if not isinstance(x, Sparse):
        return c.with_(src=to_dense(source)).run()  # the result is dense anyway
    flat, source_coordinates = valid_elements_of(source)
    own, own_coordinates = valid_elements(x)
    in_view, coordinates = _WAYS[packet_name(c.op)](c, x, own_coordinates, source_coordinates)
    kept = (~in_view).nonzero()[:, 0]
    return from_elements(x, *joined(own, own_coordinates, kept, flat, coordinates), x.shape)


# Each returns which elements of `x` are in the view, and the coordinates in `x` of the source's elements.


def _written_by_select(c: Bound, x: Sparse, own: Coordinates, source: Coordinates) -> tuple[Tensor, list[Tensor]]:
    dim = wrap_dim(c.dim, x.ndim)
    index = c.index % x.shape[dim]
    new = torch.full((source[0].shape[0] if source else 1,), index, device=x.device)
    return own[dim] == index, [*source[:dim], new, *source[dim:]]


def _written_by_slice(c: Bound, x: Sparse, own: Coordinates, source: Coordinates) -> tuple[Tensor, list[Tensor]]:
    dim, step = wrap_dim(c.dim, x.ndim), c.step
    indices = range(x.shape[dim])[c.start : c.end : step]
    first = indices[0] if len(indices) else 0
    in_view = (own[dim] >= first) & (own[dim] < first + len(indices) * step) & ((own[dim] - first) % step == 0)
    return in_view, [c * step + first if d == dim else c for d, c in enumerate(source)]


def _written_by_diagonal(c: Bound, x: Sparse, own: Coordinates, source: Coordinates) -> tuple[Tensor, list[Tensor]]:
    a, b, offset = wrap_dim(c.dim1, x.ndim), wrap_dim(c.dim2, x.ndim), c.offset
    diagonal, others = source[-1], iter(source[:-1])
    moved = {a: diagonal - min(offset, 0), b: diagonal + max(offset, 0)}
    return own[b] - own[a] == offset, [moved[d] if d in moved else next(others) for d in range(x.ndim)]


_WAYS = {
    "select_scatter": _written_by_select,
    "slice_scatter": _written_by_slice,
    "diagonal_scatter": _written_by_diagonal,
}


# ----------------------------------------------------------------------------------------- an index for every element


def contributions(c: Bound) -> tuple[Dense, list[Tensor]]:
    """The elements that a scatter writes, and their coordinates; only those with a valid index."""
    x, index, src = c.self, c.index, c.src
    raise_error_of_torch(c)
    axis = wrap_dim(c.dim, x.ndim)
    flat, coordinates = valid_elements_of(index)
    rows = flat.data.to(torch.int64)
    aten.gather(as_tensor_of((x.shape[axis],), x), 0, rows)  # raises where one is out of range
    return lookup(src, coordinates), [rows if d == axis else c for d, c in enumerate(coordinates)]


@scatter.scatter_add.lowering(Sparse)
@on_call(one_ndim="self, index, src", one_dtype="self, src", eager=True)
def scatter_add(c: Bound) -> Any:
    x, (flat, coordinates) = c.self, contributions(c)
    if isinstance(x, Sparse):
        return summed(x, flat, coordinates)
    offsets = ravel(coordinates, x.shape)
    total = x.filled(0).reshape(-1).index_add(0, offsets, flat.filled(0)).reshape(x.shape)
    if x.validity is None:
        return Dense(total)
    number = full_mask(x).to(torch.int32).reshape(-1).index_add(0, offsets, full_mask(flat).to(torch.int32))
    return Dense(total, as_int8(number > 0).reshape(x.shape))


@scatter.scatter.lowering(Sparse)
@on_call(sparse="self", one_ndim="self, index, src", one_dtype="self, src", eager=True)
def scatter_src(c: Bound) -> Any:
    flat, coordinates = contributions(c)
    return written(c.self, flat, tuple(coordinates), accumulate=False)


@assignment.index_put.lowering(Sparse)
@on_call(sparse="self", one_dtype="self, values", eager=True)
def index_put(c: Bound) -> Any:
    x, indices, values = c.self, c.indices, c.values
    used = [i for i in indices if i is not None]
    # Values are no larger than the indices, so they may be dense.
    if len(used) == 1 and indexing.is_boolean(used[0]) and used[0].shape == x.shape:
        flat_mask, coordinates = valid_elements_of(used[0])
        coordinates, flat = sorted_coordinates(flat_mask.filled(0), coordinates, x.shape), to_dense(values)
    elif len(used) == len(indices) and not any(indexing.is_boolean(i) for i in used):
        flat, coordinates = _writes_by_index(x, [to_dense(i) for i in used], to_dense(values))
    else:
        raise NotLowered("it has a mask among other indices, or an index behind a dimension without one")
    return written(x, flat.map(lambda t: t.expand(coordinates[0].shape)), coordinates, c.accumulate)


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
@on_call(sparse="self", one_dtype="self, source", eager=True, elements="self")
def put(c: Bound) -> Any:
    x, flat_index, values = c.self, to_dense(c.index).map(torch.flatten), to_dense(c.source).map(torch.flatten)
    raise_error_of_torch(c)
    aten.take(as_tensor_of(x.shape, x), flat_index.filled(0))  # raises where one is out of range
    offsets = in_range(flat_index.filled(0), math.prod(x.shape))
    if flat_index.valid is not None:
        kept = flat_index.valid.nonzero()[:, 0]
        offsets, values = offsets[kept], values.take_rows(kept)
    return written(x, values, unravel(offsets, x.shape), c.accumulate)


# -------------------------------------------------------------------------------------------------- all of the target


@assignment.copy.lowering(Sparse)
@on_call(sparse="src")
def copy(c: Bound) -> Sparse:
    expanded: Sparse = broadcast_to(c.src, c.self.shape)
    return expanded.like(expanded.values.like(expanded.values.data.to(c.self.device, c.self.dtype, copy=True)))
