"""Queries on sparse storage: counts, positions, distinct values, equality. Answers are plain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Sparse,
    as_int8,
    being_traced,
    lookup,
    ravel,
    refuse_permuted,
    sorted_coordinates,
    to_layout,
    valid_elements,
    valid_elements_of,
)
from op_registry.ops.queries import rules as queries

aten = torch.ops.aten

# --------------------------------------------------------------------------------------------- counts and positions


@queries.count_nonzero.lowering(Sparse)
def count_nonzero(op: OpOverload, self: Any, dim: Any = None) -> Tensor:
    x = self.values
    counted = self.like(x.masked_by(as_int8(x.data != 0)))
    given = range(self.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    op(torch.empty(self.shape, device="meta"), *([] if dim is None else [dim]))  # raises torch's errors
    return counted.count([d % self.ndim for d in given])


@queries.nonzero.lowering(Sparse)
def nonzero(op: OpOverload, self: Any, *, size: int | None = None, fill_value: int = -1) -> Tensor:
    if being_traced(self.values.data):
        raise NotLowered("how many there are is not known while tracing")
    flat, places = valid_elements(self)
    found = torch.stack(sorted_coordinates(flat.filled(0) != 0, places, self.shape), 1)
    if size is None:
        return found
    if size < 0:
        raise NotLowered("torch refuses the size")
    missing = max(size - found.shape[0], 0)
    return torch.cat([found[:size], found.new_full((missing, found.shape[1]), fill_value)])


@queries.histc.lowering(Sparse)
def histc(op: OpOverload, self: Any, *args: Any, **kwargs: Any) -> Any:
    return queries.histc.run(valid_elements(self)[0], *args, **kwargs)


@queries.histogram.lowering(Sparse)
def histogram(op: OpOverload, self: Any, bins: Any = 100, *, weight: Any = None, **options: Any) -> Any:
    if not isinstance(self, Sparse) or isinstance(bins, Sparse):
        raise NotLowered("its bins are sparse, or its values are not")
    flat, places = valid_elements(self)
    weights = None if weight is None else lookup(weight, places)
    if flat.shape[0] == 0:  # torch's range for nothing is another; as the rule has it: around an element of no weight
        flat = Dense(flat.data.new_full((1,), 0.5), torch.zeros(1, dtype=torch.int8, device=flat.device))
        weights = None if weights is None else Dense(weights.data.new_zeros(1))
    return queries.histogram.run(op, flat, bins, weight=weights, **options)


# -------------------------------------------------------------------------------------------------- distinct values


def by_memory(x: Sparse) -> Sparse:
    """The record as COO, whose values lie in the order of memory."""
    return to_layout(x, torch.sparse_coo)


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
    refuse_permuted(self, other)
    if self.shape != other.shape:
        if op is aten.allclose.default:
            raise NotLowered("they are of different shapes")
        return False
    op(*(torch.empty(0, dtype=r.dtype, device=r.device) for r in (self, other)), *args, **kwargs)  # torch's errors
    found = []
    for record in (self, other):
        flat, places = valid_elements_of(record)
        at = ravel(places, record.shape)
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
