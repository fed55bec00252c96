"""Queries on sparse storage: counts, histograms, positions, distinct values, equality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COO,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    as_int8,
    being_traced,
    lookup,
    ravel,
    shape_alone,
    sorted_coordinates,
    to_layout,
    valid_elements,
    valid_elements_of,
)
from op_registry.ops.queries import rules as queries

aten = torch.ops.aten

# -------------------------------------------------------------------------------------- counts, histograms, positions


@queries.count_nonzero.lowering(Sparse)
def count_nonzero(op: OpOverload, self: Sparse, dim: int | Sequence[int] | None = None) -> Tensor:
    x = self.values
    nonzero_elements = self.like(x.masked_by(as_int8(x.data != 0)))
    dims = range(self.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    op(shape_alone(self.shape), *([] if dim is None else [dim]))  # raises torch's errors
    return nonzero_elements.count([d % self.ndim for d in dims])


@queries.nonzero.lowering(Sparse)
def nonzero(op: OpOverload, self: Sparse, *, size: int | None = None, fill_value: int = -1) -> Tensor:
    if being_traced(self.values.data):
        raise NotLowered("while tracing the number of nonzero elements is unknown")
    flat, coordinates = valid_elements(self)
    indices = torch.stack(sorted_coordinates(flat.filled(0) != 0, coordinates, self.shape), 1)
    if size is None:
        return indices
    if size < 0:
        raise NotLowered("torch refuses its size")
    missing = max(size - indices.shape[0], 0)
    return torch.cat([indices[:size], indices.new_full((missing, indices.shape[1]), fill_value)])


@queries.histc.lowering(Sparse)
def histc(op: OpOverload, self: Sparse, *args: Any, **kwargs: Any) -> Any:
    return queries.histc.run(valid_elements(self)[0], *args, **kwargs)


@queries.histogram.lowering(Sparse)
def histogram(
    op: OpOverload,
    self: Dense | Sparse,
    bins: int | Dense | Sparse = 100,
    *,
    weight: Dense | Sparse | None = None,
    **options: Any,
) -> Any:
    if not isinstance(self, Sparse) or isinstance(bins, Sparse):
        raise NotLowered("its bins are sparse, or its values are not")
    flat, coordinates = valid_elements(self)
    weights = None if weight is None else lookup(weight, coordinates)
    if flat.shape[0] == 0:  # the rule's range for one invalid element, not torch's for none
        flat = Dense(flat.data.new_full((1,), 0.5), torch.zeros(1, dtype=torch.int8, device=flat.device))
        weights = None if weights is None else Dense(weights.data.new_zeros(1))
    return queries.histogram.run(op, flat, bins, weight=weights, **options)


# ---------------------------------------------------------------------------------------------------- distinct values


@queries._unique.lowering(Sparse)
def _unique(op: OpOverload, self: Sparse, sorted: bool = True, return_inverse: bool = False) -> Any:
    return _distinct(aten._unique.default, self, sorted, return_inverse, inverse=return_inverse)


@queries._unique2.lowering(Sparse)
def _unique2(
    op: OpOverload, self: Sparse, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _distinct(aten._unique2.default, self, sorted, return_inverse, return_counts, inverse=return_inverse)


@queries.unique_consecutive.lowering(Sparse)
def unique_consecutive(
    op: OpOverload, self: Sparse, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    if dim is not None:
        raise NotLowered("it compares slices, which is refused unless every element is valid")
    op = aten.unique_consecutive.default
    return _distinct(op, self, return_inverse, return_counts, inverse=return_inverse)


def _distinct(op: OpOverload, x: Sparse, *flags: Any, inverse: bool) -> tuple[Any, ...]:
    coo = to_layout(x, COO)  # whose values are in row-major order
    flat = coo.flat
    result = list(queries.distinct(op, Dense(flat.data, as_int8(_validity(flat))), *flags, inverse=inverse))
    if inverse:
        result[1] = coo.folded(result[1])
    return tuple(result)


def _validity(flat: Dense) -> Tensor:
    v = flat.full_validity
    return torch.ones(flat.shape, dtype=torch.int8, device=flat.device) if v is None else v


# ----------------------------------------------------------------------------------------------------------- equality


def _agree(op: OpOverload, self: Dense | Sparse, other: Dense | Sparse, *args: Any, **kwargs: Any) -> bool:
    """Whether both masks are the same, and `op` is true of the valid values."""
    if self.shape != other.shape:
        if op is aten.allclose.default:
            raise NotLowered("its operands have different shapes")
        return False
    op(*(torch.empty(0, dtype=r.dtype, device=r.device) for r in (self, other)), *args, **kwargs)  # torch's errors
    (values, offsets), (other_values, other_offsets) = (_valid_in_order(record) for record in (self, other))
    return bool(torch.equal(offsets, other_offsets)) and bool(op(values, other_values, *args, **kwargs))


def _valid_in_order(x: Dense | Sparse) -> tuple[Tensor, Tensor]:
    """The valid values in row-major order, and their offsets in a contiguous dense tensor."""
    flat, coordinates = valid_elements_of(x)
    offsets = ravel(coordinates, x.shape)
    order = offsets.argsort()
    return flat.data[order], offsets[order]


@queries.equal.lowering(Sparse)
def equal(op: OpOverload, self: Dense | Sparse, other: Dense | Sparse) -> bool:
    return _agree(aten.equal.default, self, other)


@queries.allclose.lowering(Sparse)
def allclose(
    op: OpOverload,
    self: Dense | Sparse,
    other: Dense | Sparse,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    return _agree(aten.allclose.default, self, other, rtol, atol, equal_nan)


# -------------------------------------------------------------------------------------------------------------- memory


@queries.record_stream.lowering(Sparse)
def record_stream(op: OpOverload, self: Sparse, s: torch.Stream) -> None:
    queries.record_stream.run(self.values, s)
    for piece in self.pattern.pieces:
        op(piece, s)


@queries.record_stream.lowering(Permuted)
def record_stream_of_permuted(op: OpOverload, self: Permuted, s: torch.Stream) -> None:
    record_stream(op, self.base, s)
