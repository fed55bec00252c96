"""Reading by index on sparse storage.

Law: as indexing.py has it. Elements read by an index for each are looked up where they are stored; a result has the
storage of its index. Elements read by one index along a dimension are joined with it, so that nothing is looked at that
is not stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Sparse,
    align_to,
    being_traced,
    broadcast_to,
    call,
    dense_or_none,
    grid_coordinates,
    lookup,
    map_dense_dim,
    ravel,
    refuse_permuted,
    sorted_coordinates,
    to_dense,
    unravel,
    valid_elements,
    valid_elements_of,
    with_coordinates,
    without_block_padding,
    wrap_dim,
)
from op_registry.ops.indexing import rules as indexing

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------- an index for every element


def as_tensor_of(shape: Sequence[int], like: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of a shape that takes no memory, for torch to check an index against."""
    return torch.zeros((), dtype=dtype or torch.int8, device=like.device).expand(tuple(shape))


def in_range(index: Tensor, size: int) -> Tensor:
    """Indices as non-negative numbers."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@indexing.gather.lowering(Sparse)
def gather(op: OpOverload, x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    refuse_permuted(x, index)
    if x.ndim == 0 or index.ndim != x.ndim or sparse_grad:
        raise NotLowered("its operands have different numbers of dimensions, or its gradient is to be sparse")
    at = wrap_dim(dim, x.ndim)
    safe = index.values.filled(0) if isinstance(index, Sparse) else index.filled(0)
    if isinstance(index, Sparse):
        if index.dense_sizes:
            raise NotLowered("its index has dense dimensions")
        flat, places = index.flat, index.pattern.places()
        aten.gather(as_tensor_of((x.shape[at],), x), 0, flat.filled(0))  # raises where one is out of range
        aten.gather(as_tensor_of(x.shape, x), dim, as_tensor_of(index.shape, x, safe.dtype))  # torch's other errors
        read = [flat.filled(0).to(torch.int64) if d == at else p for d, p in enumerate(places)]
        return index.folded(lookup(x, read).masked_by(flat.full_validity))
    aten.gather(as_tensor_of(x.shape, x), dim, safe)  # raises torch's errors
    read = [
        safe.reshape(-1).to(torch.int64) if d == at else p
        for d, p in enumerate(grid_coordinates(index.shape, x.device))
    ]
    return lookup(x, read).map(lambda t: t.reshape(index.shape)).masked_by(index.full_validity)


@indexing.take.lowering(Sparse)
def take(op: OpOverload, x: Any, index: Any) -> Any:
    refuse_permuted(x, index)
    if math.prod(x.shape) == 0 or x.ndim == 0:
        raise NotLowered("there is nothing in it, or one number")
    given = index.values if isinstance(index, Sparse) else index
    aten.take(as_tensor_of(x.shape, x), given.filled(0))  # raises where one is out of range
    at = in_range(given.filled(0).reshape(-1), math.prod(x.shape))
    found = lookup(x, unravel(at, x.shape)).map(lambda t: t.reshape(given.shape)).masked_by(given.full_validity)
    return index.like(found) if isinstance(index, Sparse) else found


@indexing.index.lowering(Sparse)
def index(op: OpOverload, x: Any, indices: Sequence[Any]) -> Any:
    refuse_permuted(x, *indices)
    used = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(indexing.is_boolean(i) for i in given):
        return _by_mask(op, x, indices, given)
    if len(given) == 1 and isinstance(x, Sparse) and isinstance(given[0], Dense):
        at, wanted = used[0], given[0]
        check_range(x, at, wanted)
        safe = wanted.map(lambda t: t.reshape(-1))
        lines = Dense(in_range(safe.filled(0), x.shape[at]), safe.validity)
        selected = index_select(x, at, lines)
        if wanted.ndim == 1:
            return selected
        return call(aten.view.default, selected, (*x.shape[:at], *wanted.shape, *x.shape[at + 1 :]))
    if used != list(range(x.ndim)):
        raise NotLowered("some dimensions have an index and some have none")
    for d, wanted in enumerate(given):
        check_range(x, d, wanted)
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    lead = next((i for i in given if isinstance(i, Sparse) and i.shape == shape), None)
    if lead is not None:
        there = [align_to(i, lead).map(lambda t: t.expand(lead.values.shape).reshape(-1)) for i in given]
    elif any(isinstance(i, Sparse) for i in given):
        raise NotLowered("no sparse index has the shape of the result")
    else:
        there = [i.map(lambda t: t.expand(shape).reshape(-1)) for i in given]
    found = lookup(x, [in_range(i.filled(0), size) for i, size in zip(there, x.shape, strict=True)])
    for i in there:
        found = found.masked_by(i.validity)
    if lead is None:
        return found.map(lambda t: t.reshape(shape))
    return lead.like(found.map(lambda t: t.reshape(lead.values.shape)))


def _by_mask(op: OpOverload, x: Any, indices: Sequence[Any], given: Sequence[Any]) -> Any:
    mask = given[0]
    if (
        len(given) > 1
        or indices[0] is None
        or being_traced(mask.values.data if isinstance(mask, Sparse) else mask.data)
    ):
        raise NotLowered("a mask among other indices, or how much it selects is not known while tracing")
    if mask.shape != x.shape:
        if isinstance(x, Sparse) and mask.ndim == 1 and mask.shape[0] == x.shape[0] and mask.dtype is torch.bool:
            return index_select(x, 0, Dense(dense_or_none(mask).filled(False).nonzero()[:, 0]))
        raise NotLowered("the mask has not the shape of what it selects from")
    flat, places = valid_elements_of(mask)
    kept = flat.filled(0).nonzero()[:, 0]
    chosen = [p[kept] for p in places]
    order = ravel(chosen, x.shape).argsort()
    return lookup(x, [p[order] for p in chosen])


def check_range(x: Any, dim: int, wanted: Any) -> None:
    """torch's own error where a valid index is out of range."""
    safe = (wanted.values if isinstance(wanted, Sparse) else wanted).filled(0)
    aten.index(as_tensor_of((x.shape[dim],), x), [safe])


def index_select_of_dense(op: OpOverload, x: Any, dim: int, index: Any) -> Any:
    if not isinstance(x, Dense) or index.ndim > 1:
        raise NotLowered("what is read from is sparse, or the index has more than one dimension")
    return indexing.index_select.run(x, dim, dense_or_none(index))  # the index is as long as the result


def embedding_of_sparse(
    op: OpOverload,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    refuse_permuted(weight, indices)
    if not isinstance(weight, Sparse) or not isinstance(indices, Dense) or scale_grad_by_freq or weight.ndim != 2:
        raise NotLowered("its weight is no sparse matrix, or its indices are sparse, or gradients are scaled")
    aten.embedding(as_tensor_of(weight.shape, weight, torch.float32), indices.filled(0))  # raises torch's errors
    if 0 <= padding_idx < weight.shape[0]:
        rows = weight.pattern.fold(weight.pattern.places()[0])
        rows = rows.reshape(rows.shape + (1,) * (weight.values.ndim - rows.ndim))
        data = weight.values.data
        weight = weight.like(weight.values.like(torch.where(rows == padding_idx, data.detach(), data)))
    found = index_select(weight, 0, indices.map(lambda t: t.reshape(-1)))
    return call(aten.view.default, found, (*indices.shape, weight.shape[1]))


# ------------------------------------------------------------------------------------ one index along a dimension


@indexing.masked_select.lowering(Sparse)
def masked_select(op: OpOverload, x: Any, mask: Any) -> Dense:
    refuse_permuted(x, mask)
    if mask.dtype is not torch.bool or being_traced(mask.values.data if isinstance(mask, Sparse) else mask.data):
        raise NotLowered("torch refuses the mask, or how much it selects is not known while tracing")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    places = true_places(mask, shape)
    if x.ndim == 0:
        return _repeated(x, places[0].shape[0] if places else int(mask.filled(False)))
    if tuple(x.shape) != tuple(shape):
        missing = len(shape) - x.ndim
        places = tuple(
            torch.zeros_like(p) if size == 1 else p for p, size in zip(places[missing:], x.shape, strict=True)
        )
    return lookup(x, places)


def _repeated(x: Dense, number: int) -> Dense:
    return x.map(lambda t: t.expand(number))


def true_places(mask: Dense | Sparse, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Where a mask, broadcast to `shape`, is valid and True, in the order of memory."""
    if isinstance(mask, Dense):
        return mask.map(lambda t: t.expand(shape)).filled(False).nonzero(as_tuple=True)
    flat, places = valid_elements(broadcast_to(mask, shape))
    return sorted_coordinates(flat.filled(False), places, shape)


def index_select(x: Sparse, dim: int, index: Any) -> Any:
    at = wrap_dim(dim, x.ndim)
    index = to_dense(index)  # as long as the result
    if index.ndim > 1:
        raise NotLowered("the index has more than one dimension")
    if at >= x.pattern.ndim and index.validity is None:
        return map_dense_dim(x, at, lambda t, d: t.index_select(d, index.data))
    if at >= x.pattern.ndim:
        return x.like(indexing.index_select.run(x.values, at - x.pattern.ndim + x.pattern.lead, index))
    wanted = index.filled(0).reshape(-1).to(torch.int64)
    line = torch.empty(x.shape[at], dtype=torch.int8, device=x.device)
    aten.index_select(line, 0, index.filled(0))  # torch's error
    flat, places = without_block_padding(x)
    order = places[at].argsort(stable=True)
    counts = torch.zeros(x.shape[at], dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, places[at], torch.ones_like(places[at]))
    starts = counts.cumsum(0) - counts
    each = counts[wanted]
    if index.validity is not None:
        each = each * index.validity.reshape(-1)  # of an invalid index nothing is valid
    where = torch.repeat_interleave(torch.arange(len(wanted), device=x.device), each)
    inside = torch.arange(where.shape[0], device=x.device) - (each.cumsum(0) - each)[where]
    source = order[starts[wanted][where] + inside]
    moved = [p[source] for p in places]
    moved[at] = where
    return with_coordinates(
        x, moved, flat.take_rows(source), [len(wanted) if d == at else n for d, n in enumerate(x.pattern.sizes)]
    )
