"""Choices and questions on sparse storage: where, masked_select; nonzero, counts, distinct values, equality.

Law: as joins.py, indexing.py and queries.py have it. A choice is valid where the condition and the chosen branch are.
So it is stored where a sparse condition is; of two sparse branches, where the chosen one is. A branch that is stored
densely is chosen densely: such a result is dense, and made only where an operand of its size is. Answers are plain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.elementwise_lowering import values_at
from op_registry.ops import indexing, joins, queries
from op_registry.ops.sparse_movement import expand
from op_registry.patterns import linear
from op_registry.records import Dense, as_bool, as_int8, being_traced, intersect
from op_registry.sparse import NotLowered, Sparse, coalesced, in_layout, joined
from op_registry.sparse_words import densely, elements_at, layout_for, listed, listed_of, only_sparse_records

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------------- choices


def broadcast(x: Any, shape: Sequence[int]) -> Any:
    """A sparse record expanded to a shape."""
    return x if tuple(x.shape) == tuple(shape) else expand(x, shape)


@joins.where.lowering(Sparse)
def where(op: OpOverload, condition: Any, self: Any, other: Any) -> Any:
    only_sparse_records(condition, self, other)
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    if isinstance(condition, Sparse):
        lead = broadcast(condition, shape)
        return lead.like(joins.where.run(lead.values, values_at(self, lead), values_at(other, lead)))
    if isinstance(self, Sparse) and isinstance(other, Sparse):
        return _of_two(condition, broadcast(self, shape), broadcast(other, shape))
    if not any(isinstance(r, Dense) and r.data.numel() == math.prod(shape) for r in (condition, self, other)):
        raise NotLowered(f"a dense branch makes a dense result of shape {tuple(shape)}, larger than any dense operand")
    return joins.where.run(condition, densely(self), densely(other))


def _of_two(condition: Dense, self: Sparse, other: Sparse) -> Sparse:
    """What is stored of each branch, where it is chosen."""
    if self.pattern.ndim != other.pattern.ndim:
        raise NotLowered("its branches are sparse in different dimensions")
    meta = [torch.empty((1,) * r.ndim, dtype=r.dtype, device="meta") for r in (self, other)]
    dtype = torch.result_type(*meta)
    sizes = self.pattern.sizes
    parts = []
    for branch, chosen in ((self, True), (other, False)):
        plain = in_layout(branch, layout_for(branch, branch.pattern.ndim))
        asked = _with_ones_behind(values_at(condition, plain), plain.values.ndim)
        here = as_int8(asked.data if chosen else ~asked.data)
        validity = intersect(plain.values.full_validity, intersect(asked.validity, here))
        assert validity is not None
        parts.append((Dense(plain.values.data.to(dtype), validity.expand(plain.values.shape)), plain.pattern.places()))
    flat = joined([flat for flat, _ in parts])
    places = tuple(torch.cat(p) for p in zip(*(p for _, p in parts), strict=True))
    if not being_traced(flat.data):
        valid = as_bool(as_int8(flat.full_validity))  # type: ignore[arg-type]
        kept = (valid.flatten(1).any(1) if valid.ndim > 1 else valid).nonzero()[:, 0]
        flat, places = flat.moved(lambda t: t.index_select(0, kept)), tuple(p[kept] for p in places)
    return coalesced(layout_for(self, self.pattern.ndim), places, flat, sizes)


def _with_ones_behind(x: Dense, ndim: int) -> Dense:
    return x.moved(lambda t: t.reshape(t.shape + (1,) * (ndim - t.ndim)))


@indexing.masked_select.lowering(Sparse)
def masked_select(op: OpOverload, x: Any, mask: Any) -> Dense:
    only_sparse_records(x, mask)
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
    return elements_at(x, places)


def _repeated(x: Dense, number: int) -> Dense:
    return x.moved(lambda t: t.expand(number))


def true_places(mask: Dense | Sparse, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Where a mask, broadcast to `shape`, is valid and True, in the order of memory."""
    if isinstance(mask, Dense):
        return mask.moved(lambda t: t.expand(shape)).filled(False).nonzero(as_tuple=True)
    flat, places = listed(broadcast(mask, shape))
    return in_memory_order(flat.filled(False), places, shape)


def in_memory_order(chosen: Tensor, places: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The places at which `chosen` is True, sorted."""
    kept = chosen.nonzero()[:, 0]
    there = [p[kept] for p in places]
    order = linear(there, shape).argsort()
    return tuple(p[order] for p in there)


# --------------------------------------------------------------------------------------------- counts and positions


@queries.count_nonzero.lowering(Sparse)
def count_nonzero(op: OpOverload, self: Any, dim: Any = None) -> Tensor:
    x = self.values
    counted = self.like(x.keep(as_int8(x.data != 0)))
    given = range(self.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    op(torch.empty(self.shape, device="meta"), *([] if dim is None else [dim]))  # raises torch's errors
    return counted.count([d % self.ndim for d in given])


@queries.nonzero.lowering(Sparse)
def nonzero(op: OpOverload, self: Any, *, size: int | None = None, fill_value: int = -1) -> Tensor:
    if being_traced(self.values.data):
        raise NotLowered("how many there are is not known while tracing")
    flat, places = listed(self)
    found = torch.stack(in_memory_order(flat.filled(0) != 0, places, self.shape), 1)
    if size is None:
        return found
    if size < 0:
        raise NotLowered("torch refuses the size")
    missing = max(size - found.shape[0], 0)
    return torch.cat([found[:size], found.new_full((missing, found.shape[1]), fill_value)])


@queries.histc.lowering(Sparse)
def histc(op: OpOverload, self: Any, *args: Any, **kwargs: Any) -> Any:
    return queries.histc.run(listed(self)[0], *args, **kwargs)


@queries.histogram.lowering(Sparse)
def histogram(op: OpOverload, self: Any, bins: Any = 100, *, weight: Any = None, **options: Any) -> Any:
    if not isinstance(self, Sparse) or isinstance(bins, Sparse):
        raise NotLowered("its bins are sparse, or its values are not")
    flat, places = listed(self)
    weights = None if weight is None else elements_at(weight, places)
    if flat.shape[0] == 0:  # torch's range for nothing is another; as the rule has it: around an element of no weight
        flat = Dense(flat.data.new_full((1,), 0.5), torch.zeros(1, dtype=torch.int8, device=flat.device))
        weights = None if weights is None else Dense(weights.data.new_zeros(1))
    return queries.histogram.run(op, flat, bins, weight=weights, **options)


# -------------------------------------------------------------------------------------------------- distinct values


def by_memory(x: Sparse) -> Sparse:
    """The record as COO, whose values lie in the order of memory."""
    return in_layout(x, torch.sparse_coo)


@queries._unique.lowering(Sparse)
def _unique(op: OpOverload, self: Any, sorted: bool = True, return_inverse: bool = False) -> Any:
    return _distinct(aten._unique.default, self, sorted, return_inverse, inverse=return_inverse)


@queries._unique2.lowering(Sparse)
def _unique2(
    op: OpOverload, self: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _distinct(aten._unique2.default, self, sorted, return_inverse, return_counts, inverse=return_inverse)


@queries.unique_consecutive.lowering(Sparse)
def unique_consecutive(
    op: OpOverload, self: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is not None:
        raise NotLowered("it compares slices, which is refused unless all is valid")
    op = aten.unique_consecutive.default
    return _distinct(op, self, return_inverse, return_counts, inverse=return_inverse)


def _distinct(op: OpOverload, x: Sparse, *flags: Any, inverse: bool) -> tuple[Any, ...]:
    lined = by_memory(x)
    flat = lined.flat
    result = list(queries.distinct(op, Dense(flat.data, as_int8(_validity(flat))), *flags, inverse=inverse))
    if inverse:
        result[1] = lined.folded(result[1])
    return tuple(result)


def _validity(flat: Dense) -> Tensor:
    v = flat.full_validity
    return torch.ones(flat.shape, dtype=torch.int8, device=flat.device) if v is None else v


# --------------------------------------------------------------------------------------------------------- equality


def _agree(op: OpOverload, self: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the same places are valid, and `op` says that what is there agrees."""
    only_sparse_records(self, other)
    if self.shape != other.shape:
        if op is aten.allclose.default:
            raise NotLowered("they are of different shapes")
        return False
    op(*(torch.empty(0, dtype=r.dtype, device=r.device) for r in (self, other)), *args, **kwargs)  # torch's errors
    found = []
    for record in (self, other):
        flat, places = listed_of(record)
        at = linear(places, record.shape)
        order = at.argsort()
        found.append((flat.data[order], at[order]))
    (mine, here), (theirs, there) = found
    return bool(torch.equal(here, there)) and bool(op(mine, theirs, *args, **kwargs))


@queries.equal.lowering(Sparse)
def equal(op: OpOverload, self: Any, other: Any) -> bool:
    return _agree(aten.equal.default, self, other)


@queries.allclose.lowering(Sparse)
def allclose(
    op: OpOverload, self: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    return _agree(aten.allclose.default, self, other, rtol, atol, equal_nan)
