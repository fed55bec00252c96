"""`where` on sparse storage: the result is stored where the condition is, or where the chosen branch is."""

from __future__ import annotations

import math

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Sparse,
    align_to,
    as_int8,
    broadcast_to,
    coalesce,
    concat_values,
    drop_invalid,
    intersect,
    layout_with_room,
    to_dense,
    to_layout,
    with_sparse_dims,
)
from op_registry.ops.movement import joins


@joins.where.lowering(Sparse)
def where(op: OpOverload, condition: Dense | Sparse, self: Dense | Sparse, other: Dense | Sparse) -> Dense | Sparse:
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    if isinstance(condition, Sparse):
        lead: Sparse = broadcast_to(condition, shape)
        return lead.like(joins.where.run(lead.values, align_to(self, lead), align_to(other, lead)))
    if isinstance(self, Sparse) and isinstance(other, Sparse):
        return _where_of_sparse(condition, broadcast_to(self, shape), broadcast_to(other, shape))
    if not any(isinstance(r, Dense) and r.data.numel() == math.prod(shape) for r in (condition, self, other)):
        raise NotLowered(f"a dense branch makes a dense result of shape {tuple(shape)}, larger than any dense operand")
    return joins.where.run(condition, to_dense(self), to_dense(other))


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
