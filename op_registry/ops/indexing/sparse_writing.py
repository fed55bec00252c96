"""Writing by index on sparse storage.

Law: as assignment.py and scatter.py have it. What is written takes the place of what was stored there, or is summed
with it; an index that is written to twice is left to torch, which promises nothing for it.
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
    dense_or_none,
    from_elements,
    full_mask,
    grid_coordinates,
    lookup,
    ravel,
    refuse_permuted,
    unravel,
    valid_elements,
    valid_elements_of,
    valid_in_all,
    wrap_dim,
)
from op_registry.ops.indexing import assignment, scatter
from op_registry.ops.indexing import rules as indexing
from op_registry.ops.indexing.sparse import as_tensor_of, check_range, in_range

aten = torch.ops.aten


def replaced(x: Sparse, hit: Tensor, flat: Dense, places: Sequence[Tensor]) -> Any:
    """`x` without its elements at positions that are in `hit` (sorted), and with others at `places`."""
    mine, own = valid_elements(x)
    at = ravel(own, x.shape)
    there = torch.cat([hit, hit.new_full((1,), torch.iinfo(torch.int64).max)])
    kept = (there[torch.searchsorted(there, at)] != at).nonzero()[:, 0]
    both = concat_values([mine.take_rows(kept), Dense(flat.data.to(x.dtype), flat.validity)])
    moved = [torch.cat([p[kept], q]) for p, q in zip(own, places, strict=True)]
    if both.validity is not None:
        valid = as_bool(as_int8(both.full_validity)).nonzero()[:, 0]  # type: ignore[arg-type]
        both, moved = Dense(both.data[valid]), [p[valid] for p in moved]
    return from_elements(x, both, moved, x.shape)


def _eager(*records: Any) -> None:
    for r in records:
        if isinstance(r, (Dense, Sparse)) and being_traced(r.values.data if isinstance(r, Sparse) else r.data):
            raise NotLowered("how much is kept is not known while tracing")


def written_rows(x: Any, dim: int, index: Any, source: Any) -> tuple[Tensor, Dense, list[Tensor]]:
    """The lines of `dim` that a valid index names, and the elements of `source` at the places that it gives them."""
    refuse_permuted(x, index, source)
    _eager(x, index, source)
    if not isinstance(x, Sparse) or source.ndim != x.ndim or index.ndim > 1:
        raise NotLowered("what is written to is stored densely, or is a number")
    at = wrap_dim(dim, x.ndim)
    where = dense_or_none(index).map(lambda t: t.reshape(-1))
    aten.index_select(as_tensor_of(x.shape, x), dim, where.filled(0))  # raises where one is out of range
    expected = [len(where.data) if d == at else n for d, n in enumerate(x.shape)]
    if list(source.shape) != expected or source.dtype is not x.dtype:
        raise NotLowered("the shapes don't fit, or the dtypes")
    flat, places = valid_elements_of(source)
    lines = where.filled(0).to(torch.int64)
    used = lines if where.valid is None else lines[where.valid]
    if where.valid is not None:
        kept = where.valid[places[at]].nonzero()[:, 0]
        flat, places = flat.take_rows(kept), tuple(p[kept] for p in places)
    return used, flat, [lines[p] if d == at else p for d, p in enumerate(places)]


@assignment.index_copy.lowering(Sparse)
def index_copy(op: OpOverload, x: Any, dim: int, index: Any, source: Any) -> Any:
    lines, flat, places = written_rows(x, dim, index, source)
    if lines.unique().shape != lines.shape:
        raise NotLowered("an index is written to twice")
    at = wrap_dim(dim, x.ndim)
    mine, own = valid_elements(x)
    unhit = torch.ones(x.shape[at], dtype=torch.bool, device=x.device).index_fill(0, lines, False)
    kept = unhit[own[at]].nonzero()[:, 0]
    both = concat_values([mine.take_rows(kept), flat])
    return from_elements(x, both, [torch.cat([p[kept], q]) for p, q in zip(own, places, strict=True)], x.shape)


@scatter.index_add.lowering(Sparse)
def index_add(op: OpOverload, x: Any, dim: int, index: Any, source: Any, *, alpha: Number = 1) -> Any:
    _, flat, places = written_rows(x, dim, index, source)
    return summed(x, flat if alpha == 1 else Dense(alpha * flat.filled(0), flat.validity), places)


def summed(x: Sparse, flat: Dense, places: Sequence[Tensor]) -> Any:
    """The sum of what is stored in `x` and of elements at places, several at one place among them."""
    mine, own = valid_elements(x)
    both = concat_values([mine, flat])
    return from_elements(x, both, [torch.cat(p) for p in zip(own, places, strict=True)], x.shape, summed=True)


@assignment.index_fill.lowering(Sparse)
def index_fill(op: OpOverload, x: Any, dim: int, index: Any, value: Any) -> Any:
    refuse_permuted(x, index, value)
    if not isinstance(x, Sparse) or index.ndim > 1:
        raise NotLowered("what is filled is stored densely")
    at, where = wrap_dim(dim, x.ndim), dense_or_none(index).map(lambda t: t.reshape(-1))
    if at >= x.pattern.ndim:
        inside = at - x.pattern.ndim + x.pattern.lead
        return x.like(assignment.index_fill.run(op, x.values, inside, where, value))
    line = torch.zeros(x.shape[at], dtype=torch.bool, device=x.device)
    aten.index_fill(line, 0, where.filled(0), 0)  # raises where one is out of range
    lines = in_range(where.filled(0), x.shape[at])
    lines = lines if where.valid is None else lines[where.valid]
    hit = line.index_fill(0, lines, True)[x.pattern.fold(x.pattern.places()[at])]
    hit = hit.reshape(hit.shape + (1,) * (x.values.ndim - hit.ndim))
    if not isinstance(value, Dense):
        return x.like(x.values.like(torch.where(hit, torch.full_like(x.values.data, value), x.values.data)))
    data = torch.where(hit, value.data.to(x.dtype), x.values.data)
    kept = None if value.validity is None else as_int8(~hit) | as_int8(value.validity)
    return x.like(Dense(data, x.values.validity).masked_by(kept if kept is None else kept.expand(data.shape)))


@assignment.select_scatter.lowering(Sparse)
def select_scatter(op: OpOverload, x: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_permuted(x, source)
    _eager(x, source)
    numbers = torch.empty(x.shape, device="meta")
    op(numbers, torch.empty(source.shape, device="meta"), *args, **kwargs)  # raises torch's errors
    if not isinstance(x, Sparse):
        return assignment.select_scatter.run(op, x, dense_or_none(source), *args, **kwargs)  # into what is dense anyway
    places_of: dict[str, Callable[..., Any]] = {
        "select_scatter": _of_select,
        "slice_scatter": _of_slice,
        "diagonal_scatter": _of_diagonal,
    }
    name = op._schema.name.partition("::")[2]
    flat, places = valid_elements_of(source)
    mine, own = valid_elements(x)
    inside, to = places_of[name](x, own, places, *args, **kwargs)
    kept = (~inside).nonzero()[:, 0]
    both = concat_values([mine.take_rows(kept), Dense(flat.data.to(x.dtype), flat.validity)])
    return from_elements(x, both, [torch.cat([p[kept], q]) for p, q in zip(own, to, strict=True)], x.shape)


def _of_select(x: Sparse, own: Coordinates, places: Coordinates, dim: int, index: int) -> tuple[Tensor, list[Tensor]]:
    at = wrap_dim(dim, x.ndim)
    wanted = index % x.shape[at]
    new = torch.full((places[0].shape[0] if places else 1,), wanted, device=x.device)
    return own[at] == wanted, [*places[:at], new, *places[at:]]


def _of_slice(
    x: Sparse,
    own: Coordinates,
    places: Coordinates,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    at = wrap_dim(dim, x.ndim)
    lines = range(x.shape[at])[start:end:step]
    first = lines[0] if len(lines) else 0
    inside = (own[at] >= first) & (own[at] < first + len(lines) * step) & ((own[at] - first) % step == 0)
    return inside, [p * step + first if d == at else p for d, p in enumerate(places)]


def _of_diagonal(
    x: Sparse, own: Coordinates, places: Coordinates, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> tuple[Tensor, list[Tensor]]:
    a, b = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    along, others = places[-1], iter(places[:-1])
    moved = {a: along - min(offset, 0), b: along + max(offset, 0)}
    return own[b] - own[a] == offset, [moved[d] if d in moved else next(others) for d in range(x.ndim)]


def contributions(x: Any, dim: int, index: Any, src: Any) -> tuple[Dense, list[Tensor]]:
    """What a scatter writes: values, and where; only what has a valid index."""
    refuse_permuted(x, index, src)
    _eager(x, index, src)
    if x.ndim == 0 or index.ndim != x.ndim or (src is not None and src.ndim != x.ndim):
        raise NotLowered("its operands have different numbers of dimensions")
    at = wrap_dim(dim, x.ndim)
    for d in range(x.ndim):
        short = src is not None and index.shape[d] > src.shape[d]
        if short or (d != at and index.shape[d] > x.shape[d]):
            raise NotLowered("the shapes don't fit")
    flat, places = valid_elements_of(index)
    lines = flat.data.to(torch.int64)
    aten.gather(as_tensor_of((x.shape[at],), x), 0, lines)  # raises where one is out of range
    values = lookup(src, places)
    return values, [lines if d == at else p for d, p in enumerate(places)]


@scatter.scatter_add.lowering(Sparse)
def scatter_add(op: OpOverload, x: Any, dim: int, index: Any, src: Any) -> Any:
    values, places = contributions(x, dim, index, src)
    if x.dtype is not src.dtype:
        raise NotLowered("its operands have different dtypes")
    if isinstance(x, Sparse):
        return summed(x, values, places)
    at = ravel(places, x.shape)
    total = x.filled(0).reshape(-1).index_add(0, at, values.filled(0)).reshape(x.shape)
    if x.validity is None:
        return Dense(total)
    number = full_mask(x).to(torch.int32).reshape(-1).index_add(0, at, full_mask(values).to(torch.int32))
    return Dense(total, as_int8(number > 0).reshape(x.shape))


@scatter.scatter.lowering(Sparse)
def scatter_src(op: OpOverload, x: Any, dim: int, index: Any, src: Any) -> Any:
    values, places = contributions(x, dim, index, src)
    at = ravel(places, x.shape)
    hit = at.unique()
    if not isinstance(x, Sparse) or hit.shape != at.shape or x.dtype is not src.dtype:
        raise NotLowered("it writes to one place twice, or into what is stored densely")
    return replaced(x, hit, values, places)


@assignment.index_put.lowering(Sparse)
def index_put(op: OpOverload, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    refuse_permuted(x, values, *indices)
    _eager(x, values, *indices)
    given = [i for i in indices if i is not None]
    if not isinstance(x, Sparse) or x.dtype is not values.dtype:
        raise NotLowered("what is written to is stored densely, or the dtypes differ")
    if len(given) == 1 and indexing.is_boolean(given[0]) and given[0].shape == x.shape:
        flat, chosen = valid_elements_of(given[0])
        kept = flat.filled(0).nonzero()[:, 0]
        chosen = tuple(p[kept] for p in chosen)
        order = ravel(chosen, x.shape).argsort()
        there: tuple[Tensor, ...] = tuple(p[order] for p in chosen)
    elif not any(i is None or indexing.is_boolean(i) for i in indices):
        given = [dense_or_none(i) for i in given]  # as many as there are values
        for d, wanted in enumerate(given):
            check_range(x, d, wanted)
        shape = torch.broadcast_shapes(*(i.shape for i in given))
        whole = (*shape, *x.shape[len(given) :])
        each = grid_coordinates(whole, x.device)
        nowhere_else = torch.zeros(math.prod(whole), dtype=torch.int64, device=x.device)  # single elements: all alike
        here, rest = ravel(each[: len(shape)], shape) if shape else nowhere_else, each[len(shape) :]
        lines = [i.map(lambda t: t.expand(shape).reshape(-1)[here]) for i in given]
        there = (*(in_range(i.filled(0), size) for i, size in zip(lines, x.shape, strict=False)), *rest)
        values = dense_or_none(values).map(lambda t: t.expand(whole).reshape(-1))
        kept_by = valid_in_all(*lines)
        if kept_by is not None:  # an invalid index writes nothing
            kept = as_bool(kept_by).nonzero()[:, 0]
            values, there = values.take_rows(kept), tuple(p[kept] for p in there)
    else:
        raise NotLowered("a mask among other indices, or an index behind a dimension without one")
    if isinstance(values, Sparse):
        values = dense_or_none(values)  # as many as there are indices
    flat = values.map(lambda t: t.expand(there[0].shape))
    return _written(x, flat, there, accumulate)


def _written(x: Sparse, flat: Dense, places: Coordinates, accumulate: bool) -> Any:
    if accumulate:
        return summed(x, flat, places)
    hit = ravel(places, x.shape).unique()
    if hit.shape != places[0].shape:
        raise NotLowered("it writes to one place twice")
    return replaced(x, hit, flat, places)


@assignment.put.lowering(Sparse)
def put(op: OpOverload, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    refuse_permuted(x, index, source)
    _eager(x, index, source)
    if not isinstance(x, Sparse) or x.dtype is not source.dtype or math.prod(x.shape) == 0:
        raise NotLowered("what is written to is stored densely, or the dtypes differ, or there is nothing in it")
    where, values = (
        dense_or_none(index).map(torch.flatten),
        dense_or_none(source).map(torch.flatten),
    )  # one for each
    if where.shape != values.shape:
        raise NotLowered("there is not one value for each index")
    aten.take(as_tensor_of(x.shape, x), where.filled(0))  # raises where one is out of range
    at = in_range(where.filled(0), math.prod(x.shape))
    if where.valid is not None:
        kept = where.valid.nonzero()[:, 0]
        at, values = at[kept], values.take_rows(kept)
    return _written(x, values, unravel(at, x.shape), accumulate)


@assignment.copy.lowering(Sparse)
def copy(op: OpOverload, x: Any, source: Any, non_blocking: bool = False) -> Any:
    refuse_permuted(x, source)
    if not isinstance(source, Sparse):
        raise NotLowered("what is copied is stored densely, and so is the result")
    whole = broadcast_to(source, x.shape)
    return whole.like(whole.values.like(whole.values.data.to(x.device, x.dtype, copy=True)))
