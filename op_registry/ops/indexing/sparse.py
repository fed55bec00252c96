"""Reading by index on sparse storage.

Law: as for dense storage (rules.py). Where every element of the result has an index of its own, elements are looked up
among the stored ones, and the result has the storage of its index. A single index along a dimension is joined with the
stored coordinates, so that elements that are not stored are never visited.
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
    being_traced,
    broadcast_to,
    call,
    grid_coordinates,
    lookup,
    map_dense_dim,
    on_call,
    sorted_coordinates,
    to_dense,
    unpadded_elements,
    unravel,
    valid_elements,
    valid_elements_of,
    with_coordinates,
    wrap_dim,
)
from op_registry.ops.indexing import rules as indexing

aten = torch.ops.aten


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
