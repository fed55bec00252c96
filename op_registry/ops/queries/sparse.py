"""Queries on sparse storage: counts, histograms, positions, distinct values, equality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COO,
    Bound,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    as_int8,
    broadcast_to,
    lookup,
    on_call,
    raise_error_of_torch,
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
@on_call(eager=True)
def nonzero(c: Bound) -> Tensor:
    flat, coordinates = valid_elements(c.self)
    indices = torch.stack(sorted_coordinates(flat.filled(0) != 0, coordinates, c.self.shape), 1)
    if "size" not in c:
        return indices
    raise_error_of_torch(c)
    missing = max(c.size - indices.shape[0], 0)
    return torch.cat([indices[: c.size], indices.new_full((missing, indices.shape[1]), c.fill_value)])


@queries.histc.lowering(Sparse)
def histc(op: OpOverload, self: Sparse, *args: Any, **kwargs: Any) -> Any:
    return queries.histc.run(valid_elements(self)[0], *args, **kwargs)


@queries.histogram.lowering(Sparse)
@on_call(sparse="self", dense="bins")
def histogram(c: Bound) -> Any:
    if c.weight is not None and c.weight.shape != c.self.shape:
        raise NotLowered("the weights have another shape")
    flat, coordinates = valid_elements(c.self)
    weights = None if c.weight is None else lookup(c.weight, coordinates)
    if flat.shape[0] == 0:  # an invalid element instead, to get the range of the rule for dense storage, not torch's
        flat = Dense(flat.data.new_full((1,), 0.5), torch.zeros(1, dtype=torch.int8, device=flat.device))
        weights = None if weights is None else Dense(weights.data.new_zeros(1))
    return c.with_(self=flat, weight=weights).run()


# ---------------------------------------------------------------------------------------------------- distinct values


@queries._unique.lowering(Sparse)
@queries._unique2.lowering(Sparse)
@queries.unique_consecutive.lowering(Sparse)
@on_call(only=(("dim", None),))
def distinct(c: Bound) -> tuple[Any, ...]:
    coo = to_layout(c.self, COO)  # whose values are in row-major order
    flat = coo.flat
    result = list(c.with_(self=Dense(flat.data, as_int8(_validity(flat)))).run())
    if c.return_inverse:
        result[1] = coo.folded(result[1])
    return tuple(result)


def _validity(flat: Dense) -> Tensor:
    v = flat.full_validity
    return torch.ones(flat.shape, dtype=torch.int8, device=flat.device) if v is None else v


# ----------------------------------------------------------------------------------------------------------- equality


@queries.equal.lowering(Sparse)
@queries.allclose.lowering(Sparse)
@on_call
def agree(c: Bound) -> bool:
    """Whether both masks are the same, and the operator is true of the valid values."""
    records = (c.self, c.other)
    if c.self.shape != c.other.shape and c.op is aten.equal.default:
        return False
    empty = (torch.empty(0, dtype=r.dtype, device=r.device) for r in records)
    c.with_(**dict(zip(("self", "other"), empty, strict=True))).applied(c.op)  # raises torch's errors
    shape = torch.broadcast_shapes(*(r.shape for r in records))
    (values, offsets), (other_values, other_offsets) = (_valid_in_order(r, shape) for r in records)
    same_mask = bool(torch.equal(offsets, other_offsets))
    return same_mask and bool(c.with_(self=values, other=other_values).applied(c.op))


def _valid_in_order(x: Dense | Sparse, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The valid values of a record expanded to a shape, in row-major order, and their offsets in a dense tensor."""
    expanded = broadcast_to(x, shape) if isinstance(x, Sparse) else x.map(lambda t: t.expand(shape))
    flat, coordinates = valid_elements_of(expanded)
    offsets = ravel(coordinates, shape)
    order = offsets.argsort()
    return flat.data[order], offsets[order]


# -------------------------------------------------------------------------------------------------------------- memory


@queries.record_stream.lowering(Sparse)
def record_stream(op: OpOverload, self: Sparse, s: torch.Stream) -> None:
    queries.record_stream.run(self.values, s)
    for piece in self.pattern.pieces:
        op(piece, s)


@queries.record_stream.lowering(Permuted)
def record_stream_of_permuted(op: OpOverload, self: Permuted, s: torch.Stream) -> None:
    record_stream(op, self.base, s)
