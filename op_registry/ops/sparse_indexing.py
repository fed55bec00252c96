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

from op_registry.elementwise_lowering import values_at
from op_registry.ops import indexing, interpolation, movement, views
from op_registry.ops.sparse_movement import (
    flip,
    in_order_of,
    index_select,
    moves,
    only_sparse,
    position,
    view,
)
from op_registry.patterns import linear, unraveled
from op_registry.records import Dense, Number, being_traced
from op_registry.sparse import NotLowered, Sparse, stored_valid
from op_registry.sparse_broadcast import rebuilt
from op_registry.sparse_words import (
    densely,
    elements_at,
    grid,
    listed_of,
    only_sparse_records,
)

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
    only_sparse_records(x, index)
    if x.ndim == 0 or index.ndim != x.ndim or sparse_grad:
        raise NotLowered("its operands have different numbers of dimensions, or its gradient is to be sparse")
    at = position(dim, x.ndim)
    safe = index.values.filled(0) if isinstance(index, Sparse) else index.filled(0)
    if isinstance(index, Sparse):
        if index.dense_sizes:
            raise NotLowered("its index has dense dimensions")
        flat, places = index.flat, index.pattern.places()
        aten.gather(as_tensor_of((x.shape[at],), x), 0, flat.filled(0))  # raises where one is out of range
        aten.gather(as_tensor_of(x.shape, x), dim, as_tensor_of(index.shape, x, safe.dtype))  # torch's other errors
        read = [flat.filled(0).to(torch.int64) if d == at else p for d, p in enumerate(places)]
        return index.folded(elements_at(x, read).keep(flat.full_validity))
    aten.gather(as_tensor_of(x.shape, x), dim, safe)  # raises torch's errors
    read = [safe.reshape(-1).to(torch.int64) if d == at else p for d, p in enumerate(grid(index.shape, x.device))]
    return elements_at(x, read).moved(lambda t: t.reshape(index.shape)).keep(index.full_validity)


@indexing.take.lowering(Sparse)
def take(op: OpOverload, x: Any, index: Any) -> Any:
    only_sparse_records(x, index)
    if math.prod(x.shape) == 0 or x.ndim == 0:
        raise NotLowered("there is nothing in it, or one number")
    given = index.values if isinstance(index, Sparse) else index
    aten.take(as_tensor_of(x.shape, x), given.filled(0))  # raises where one is out of range
    at = in_range(given.filled(0).reshape(-1), math.prod(x.shape))
    found = elements_at(x, unraveled(at, x.shape)).moved(lambda t: t.reshape(given.shape)).keep(given.full_validity)
    return index.like(found) if isinstance(index, Sparse) else found


@indexing.index.lowering(Sparse)
def index(op: OpOverload, x: Any, indices: Sequence[Any]) -> Any:
    only_sparse_records(x, *indices)
    used = [d for d, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    if any(indexing.is_boolean(i) for i in given):
        return _by_mask(op, x, indices, given)
    if len(given) == 1 and isinstance(x, Sparse) and isinstance(given[0], Dense):
        at, wanted = used[0], given[0]
        check_range(x, at, wanted)
        safe = wanted.moved(lambda t: t.reshape(-1))
        lines = Dense(in_range(safe.filled(0), x.shape[at]), safe.validity)
        selected = index_select(x, at, lines)
        return view(selected, (*x.shape[:at], *wanted.shape, *x.shape[at + 1 :])) if wanted.ndim != 1 else selected
    if used != list(range(x.ndim)):
        raise NotLowered("some dimensions have an index and some have none")
    for d, wanted in enumerate(given):
        check_range(x, d, wanted)
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    lead = next((i for i in given if isinstance(i, Sparse) and i.shape == shape), None)
    if lead is not None:
        there = [values_at(i, lead).moved(lambda t: t.expand(lead.values.shape).reshape(-1)) for i in given]
    elif any(isinstance(i, Sparse) for i in given):
        raise NotLowered("no sparse index has the shape of the result")
    else:
        there = [i.moved(lambda t: t.expand(shape).reshape(-1)) for i in given]
    found = elements_at(x, [in_range(i.filled(0), size) for i, size in zip(there, x.shape, strict=True)])
    for i in there:
        found = found.keep(i.validity)
    if lead is None:
        return found.moved(lambda t: t.reshape(shape))
    return lead.like(found.moved(lambda t: t.reshape(lead.values.shape)))


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
            return index_select(x, 0, Dense(densely(mask).filled(False).nonzero()[:, 0]))
        raise NotLowered("the mask has not the shape of what it selects from")
    flat, places = listed_of(mask)
    kept = flat.filled(0).nonzero()[:, 0]
    chosen = [p[kept] for p in places]
    order = linear(chosen, x.shape).argsort()
    return elements_at(x, [p[order] for p in chosen])


def check_range(x: Any, dim: int, wanted: Any) -> None:
    """torch's own error where a valid index is out of range."""
    safe = (wanted.values if isinstance(wanted, Sparse) else wanted).filled(0)
    aten.index(as_tensor_of((x.shape[dim],), x), [safe])


def index_select_of_dense(op: OpOverload, x: Any, dim: int, index: Any) -> Any:
    if not isinstance(x, Dense) or index.ndim > 1:
        raise NotLowered("what is read from is sparse, or the index has more than one dimension")
    return indexing.index_select.run(x, dim, densely(index))  # the index is as long as the result


def embedding_of_sparse(
    op: OpOverload,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    only_sparse_records(weight, indices)
    if not isinstance(weight, Sparse) or not isinstance(indices, Dense) or scale_grad_by_freq or weight.ndim != 2:
        raise NotLowered("its weight is no sparse matrix, or its indices are sparse, or gradients are scaled")
    aten.embedding(as_tensor_of(weight.shape, weight, torch.float32), indices.filled(0))  # raises torch's errors
    if 0 <= padding_idx < weight.shape[0]:
        rows = weight.pattern.fold(weight.pattern.places()[0])
        rows = rows.reshape(rows.shape + (1,) * (weight.values.ndim - rows.ndim))
        data = weight.values.data
        weight = weight.like(weight.values.like(torch.where(rows == padding_idx, data.detach(), data)))
    found = index_select(weight, 0, indices.moved(lambda t: t.reshape(-1)))
    return view(found, (*indices.shape, weight.shape[1]))


# ------------------------------------------------------------------------------------ one index along a dimension


def selected_by(x: Sparse, chosen: dict[int, Tensor]) -> Sparse:
    """Index_select along several dimensions in turn."""
    for dim, lines in chosen.items():
        x = index_select(x, dim, Dense(lines))
    return x


def _padded_by(*rules: Any) -> None:
    """Paddings that repeat elements: along each dimension the index that torch's own kernel has for a line."""
    for rule in rules:
        rule.lowering(Sparse)(_padded)


def _padded(op: OpOverload, x: Any, pad: Sequence[int]) -> Any:
    op(torch.empty(x.shape, device="meta"), pad)  # raises torch's errors
    if op is aten._pad_circular.default and any(width < 0 for width in pad):
        raise NotLowered("what is left goes round, not what there was")
    dims = [x.ndim - 1 - n for n in range(len(pad) // 2)]
    return selected_by(x, {d: _line(op, x, d, pad[2 * n : 2 * n + 2]) for n, d in enumerate(dims)})


def _line(op: OpOverload, x: Any, dim: int, pad: Sequence[int]) -> Tensor:
    """Which element of a dimension each of a padded one repeats."""
    size = x.shape[dim]
    before, after = pad
    at = torch.arange(-before, size + after, device=x.device)
    name = op._schema.name
    if "replication" in name:
        return at.clamp(0, size - 1)
    if "circular" in name:
        return at % size
    folded = at.abs()
    return torch.where(folded >= size, 2 * (size - 1) - folded, folded)


_padded_by(movement.reflection_pad, movement.replication_pad, movement._pad_circular)


@movement.constant_pad_nd.lowering(Sparse)
def constant_pad_nd(op: OpOverload, x: Any, pad: Sequence[int], value: Number = 0) -> Any:
    if any(width > 0 for width in pad):
        raise NotLowered("what is padded with is valid, and would have to be stored")
    aten.constant_pad_nd(torch.empty(x.shape, device="meta"), pad, value)  # raises torch's errors
    chosen = {}
    for n in range(len(pad) // 2):
        dim = x.ndim - 1 - n
        if pad[2 * n] or pad[2 * n + 1]:
            chosen[dim] = torch.arange(-pad[2 * n], x.shape[dim] + pad[2 * n + 1], device=x.device)
    return selected_by(x, chosen)


def rot90(op: OpOverload, x: Any, *args: Any) -> Any:
    if op is not aten.rot90.default:
        raise NotLowered("it is no quarter turn")
    times, dims = (args[0] if args else 1) % 4, list(args[1]) if len(args) > 1 else [0, 1]
    aten.rot90(torch.empty(x.shape, device="meta"), times, dims)  # raises torch's errors
    a, b = (d % x.ndim for d in dims)
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    if times == 0:
        return x.like(x.values.moved(torch.clone))
    if times == 2:
        return _flipped(x, [a, b])
    turned = _flipped(x, [b]) if times == 1 else in_order_of(x, order)
    if not isinstance(turned, Sparse):
        raise NotLowered("it turns dense dimensions before sparse ones")
    return in_order_of(turned, order) if times == 1 else _flipped(turned, [b])


def _flipped(x: Sparse, dims: Sequence[int]) -> Any:
    return flip(x, list(dims))


@moves(views.unfold)
def unfold(x: Sparse, dimension: int, size: int, step: int) -> Any:
    """Every window as a line of its own, behind the other dimensions; an element is in several."""
    only_sparse(x)
    shape = torch.empty(x.shape, device="meta").unfold(dimension, size, step).shape
    at = position(dimension, x.ndim)
    flat, places = stored_valid(x)
    each = -(-size // step)
    source = torch.arange(places[at].shape[0], device=x.device).repeat_interleave(each)
    back = torch.arange(each, device=x.device).repeat(places[at].shape[0])
    window = places[at][source] // step - back
    inside = places[at][source] - window * step
    kept = ((window >= 0) & (window < shape[at]) & (inside < size)).nonzero()[:, 0]
    source = source[kept]
    moved = [window[kept] if d == at else p[source] for d, p in enumerate(places)]
    return rebuilt(x, [*moved, inside[kept]], flat.taken(source), shape)


def _nearest(rule: Any) -> None:
    """Nearest neighbours: along each dimension the index that torch's kernel has for a line of its own."""

    def run(op: OpOverload, x: Any, output_size: Any, *args: Any) -> Any:
        if not op._schema.name.startswith(("aten::upsample_nearest", "aten::_upsample_nearest")):
            raise NotLowered("it weighs neighbours")
        if x.dtype is torch.uint8 or not x.dtype.is_floating_point or 0 in x.shape:
            raise NotLowered("there is nothing in it, or torch has kernels of its own")
        size = op(torch.empty(x.shape, device="meta", dtype=x.dtype), output_size, *args).shape
        exact = "exact" in op._schema.name
        line_op = aten._upsample_nearest_exact1d.default if exact else aten.upsample_nearest1d.default
        by_vec = op._overloadname == "vec"
        factors = args[0] if by_vec and args else list(args)
        chosen = {}
        for n, dim in enumerate(range(2, x.ndim)):
            scale = factors[n] if factors and n < len(factors) else None
            line = torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).reshape(1, 1, -1)
            chosen[dim] = line_op(line, [size[dim]], scale).reshape(-1).to(torch.int64)
        return selected_by(x, chosen)

    rule.lowering(Sparse)(run)


_nearest(interpolation.upsample_nearest)
_nearest(interpolation.upsample_vec)
