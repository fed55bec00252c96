"""Choices on sparse storage: stored where the condition is, or where the chosen one of two branches is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Sparse,
    align_to,
    as_bool,
    as_int8,
    being_traced,
    broadcast_to,
    coalesce,
    concat_values,
    dense_or_none,
    intersect,
    layout_with_room,
    refuse_permuted,
    to_layout,
)
from op_registry.ops.movement import joins


@joins.where.lowering(Sparse)
def where(op: OpOverload, condition: Any, self: Any, other: Any) -> Any:
    refuse_permuted(condition, self, other)
    shape = torch.broadcast_shapes(condition.shape, self.shape, other.shape)
    if isinstance(condition, Sparse):
        lead = broadcast_to(condition, shape)
        return lead.like(joins.where.run(lead.values, align_to(self, lead), align_to(other, lead)))
    if isinstance(self, Sparse) and isinstance(other, Sparse):
        return _of_two(condition, broadcast_to(self, shape), broadcast_to(other, shape))
    if not any(isinstance(r, Dense) and r.data.numel() == math.prod(shape) for r in (condition, self, other)):
        raise NotLowered(f"a dense branch makes a dense result of shape {tuple(shape)}, larger than any dense operand")
    return joins.where.run(condition, dense_or_none(self), dense_or_none(other))


def _of_two(condition: Dense, self: Sparse, other: Sparse) -> Sparse:
    """What is stored of each branch, where it is chosen."""
    if self.pattern.ndim != other.pattern.ndim:
        raise NotLowered("its branches are sparse in different dimensions")
    meta = [torch.empty((1,) * r.ndim, dtype=r.dtype, device="meta") for r in (self, other)]
    dtype = torch.result_type(*meta)
    sizes = self.pattern.sizes
    parts = []
    for branch, chosen in ((self, True), (other, False)):
        plain = to_layout(branch, layout_with_room(branch, branch.pattern.ndim))
        asked = _with_ones_behind(align_to(condition, plain), plain.values.ndim)
        here = as_int8(asked.data if chosen else ~asked.data)
        validity = intersect(plain.values.full_validity, intersect(asked.validity, here))
        assert validity is not None
        parts.append((Dense(plain.values.data.to(dtype), validity.expand(plain.values.shape)), plain.pattern.places()))
    flat = concat_values([flat for flat, _ in parts])
    places = tuple(torch.cat(p) for p in zip(*(p for _, p in parts), strict=True))
    if not being_traced(flat.data):
        valid = as_bool(as_int8(flat.full_validity))  # type: ignore[arg-type]
        kept = (valid.flatten(1).any(1) if valid.ndim > 1 else valid).nonzero()[:, 0]
        flat, places = flat.map(lambda t: t.index_select(0, kept)), tuple(p[kept] for p in places)
    return coalesce(layout_with_room(self, self.pattern.ndim), places, flat, sizes)


def _with_ones_behind(x: Dense, ndim: int) -> Dense:
    return x.map(lambda t: t.reshape(t.shape + (1,) * (ndim - t.ndim)))
