"""Joins and choices.

Law of joins: each element keeps its validity. Law of `where`: the chosen branch; valid where the condition and the
chosen branch are, so ``where(mask, x, 0)`` imputes. The branch that is not chosen has no influence, not even in
backward, because torch's derivative of `where` selects and never multiplies.

Law of `where` in sparse storage: with a sparse condition, the result stores what the condition stores; with a dense one
and sparse branches, what the chosen branch stores. If a branch is dense too, the result is dense; where broadcasting
makes it larger than every dense operand, the sparse operands count as stored densely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    CHOICE,
    JOIN,
    Dense,
    NotLowered,
    Sparse,
    Unknown,
    align_to,
    aligned_validity,
    as_int8,
    broadcast_along,
    broadcast_to,
    intersect,
    masked_rule,
    run_movement,
    to_dense,
)
from op_registry.dimensions.movements import Joined
from op_registry.records.arguments import choose
from op_registry.records.layout import joinable_validities
from op_registry.sparse.convert import (
    coalesce,
    concat_values,
    drop_invalid,
    layout_with_room,
    to_layout,
    with_sparse_dims,
)
from op_registry.traits import Traits

aten = torch.ops.aten


@masked_rule(aten.cat.default, category=JOIN, dims=Joined())
def cat(tensors: Sequence[Dense], dim: int = 0) -> Dense:
    data = aten.cat([x.data for x in tensors], dim)
    # torch skips empty 1-d tensors, whatever the others' shape.
    joined = [x for x in tensors if x.ndim == data.ndim and (x.ndim != 1 or x.shape[0] != 0)]
    if all(x.validity is None for x in joined):
        return Dense(data)
    first = aligned_validity(joined[0])
    if first is not None and broadcast_along(first, dim) and all(x.validity is joined[0].validity for x in joined):
        return Dense(data, first)
    return Dense(data, aten.cat(joinable_validities(joined, along=dim % data.ndim), dim))


@masked_rule(aten.stack.default, aten._stack.default, category=JOIN, takes_op=True, dims=Joined(stacked=True))
def stack(op: OpOverload, tensors: Sequence[Dense], dim: int = 0) -> Dense:
    data = op([x.data for x in tensors], dim)
    first = tensors[0].validity
    if all(x.validity is first for x in tensors):
        v = aligned_validity(tensors[0])
        return Dense(data, None if v is None else v.unsqueeze(dim))
    return Dense(data, aten.stack(joinable_validities(tensors), dim))


@masked_rule(
    aten._chunk_cat.default, category=JOIN, takes_op=True, dims=Unknown("pieces of all operands lie side by side")
)
def _chunk_cat(op: OpOverload, tensors: Sequence[Dense], dim: int, num_chunks: int) -> Dense:
    """Chunks side by side, each tensor padded with (valid) zeros to a multiple of the chunk size."""
    return run_movement(op, tensors, dim, num_chunks, _traits=Traits(writes=True))


@masked_rule(aten.where.self, category=CHOICE)
def where(condition: Dense, self: Dense, other: Dense) -> Dense:
    data = choose(condition.data, self.data, other.data)
    chosen = self.validity
    if self.validity is not other.validity:
        one = data.new_ones((), dtype=torch.int8)
        branches = [one if branch.validity is None else as_int8(branch.validity) for branch in (self, other)]
        chosen = aten.where(condition.data, *branches)
    return Dense(data, intersect(condition.validity, chosen))


# ---------------------------------------------------------------------------------------------- where on sparse storage

# The result is stored where the condition is, or where the chosen branch is.


@where.lowering(Sparse)
def where_sparse(
    op: OpOverload, condition: Dense | Sparse, self: Dense | Sparse, other: Dense | Sparse
) -> Dense | Sparse:
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    if isinstance(condition, Sparse):
        lead: Sparse = broadcast_to(condition, shape)
        return lead.like(where.run(lead.values, align_to(self, lead), align_to(other, lead)))
    if isinstance(self, Sparse) and isinstance(other, Sparse):
        return _where_of_sparse(condition, broadcast_to(self, shape), broadcast_to(other, shape))
    if not any(isinstance(r, Dense) and r.data.numel() == math.prod(shape) for r in (condition, self, other)):
        raise NotLowered(f"a dense branch makes a dense result of shape {tuple(shape)}, larger than any dense operand")
    return where.run(condition, to_dense(self), to_dense(other))


def _where_of_sparse(condition: Dense, self: Sparse, other: Sparse) -> Sparse:
    """The stored elements of each branch, where the condition chooses it."""
    sparse = max(self.pattern.ndim, other.pattern.ndim)
    self, other = with_sparse_dims(self, sparse), with_sparse_dims(other, sparse)
    meta = [torch.empty((1,) * r.ndim, dtype=r.dtype, device="meta") for r in (self, other)]
    dtype = torch.result_type(*meta)
    sizes = self.pattern.sizes
    parts = []
    for branch, chosen_by in ((self, True), (other, False)):
        stored = to_layout(branch, layout_with_room(branch, branch.pattern.ndim))
        values = stored.values
        aligned = align_to(condition, stored)
        chosen = as_int8(aligned.data if chosen_by else ~aligned.data)
        validity = intersect(values.full_validity, intersect(aligned.validity, chosen))
        assert validity is not None
        parts.append((Dense(values.data.to(dtype), validity.expand(values.shape)), stored.pattern.coordinates()))
    flat = concat_values([flat for flat, _ in parts])
    coordinates = tuple(torch.cat(c) for c in zip(*(c for _, c in parts), strict=True))
    flat, coordinates = drop_invalid(flat, coordinates)
    return coalesce(layout_with_room(self, self.pattern.ndim), coordinates, flat, sizes)
