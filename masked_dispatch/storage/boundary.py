"""The differentiable boundary of sparse storage: as gradient.py, for values in places of a pattern.

The gradient of a sparsely stored tensor is stored in its own pattern: absent where the tensor is invalid. What comes
back to a sparse result may be stored anyhow: what it has in the result's places is taken from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.gradient import check_in_sight, check_not_captured, keep, opened
from masked_dispatch.interception import in_forward_mode, never_compiled, under_transform
from masked_dispatch.storage.policy import check_allowed
from masked_dispatch.storage.wrapper import SparseInTransform, SparselyStored, wrap_sparse
from masked_dispatch.tensor import MaskedTensor
from op_registry.elementwise_lowering import values_at
from op_registry.patterns import OF_TORCH, Pattern
from op_registry.records import Dense, as_int8, fill_where_invalid, intersect
from op_registry.sparse import Sparse
from op_registry.turned import AnyRecord, Turned, to_dense, turned_back


class SparseWrap(torch.autograd.Function):
    """Plain values → a masked tensor that stores them. Tangents are zero where a value is invalid."""

    @staticmethod
    @never_compiled
    def forward(
        ctx: Any, values: Tensor, validity: Tensor | None, pattern: Pattern, order: tuple[int, ...] | None
    ) -> SparselyStored:
        keep(ctx, validity)
        ctx.pattern, ctx.order = pattern, order
        ctx.set_materialize_grads(False)
        ctx.like = values.new_empty(()).expand(values.shape)
        return wrap_sparse(_in_order(Sparse(Dense(values.detach(), validity), pattern), order))

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        return in_places(grad, Sparse(Dense(ctx.like, ctx.saved_tensors[0]), ctx.pattern), ctx.order), None, None, None

    @staticmethod
    @never_compiled
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> SparselyStored:
        filled = fill_where_invalid(tangent, ctx.validity, 0)
        result: SparselyStored = SparseWrap.apply(filled, ctx.validity, ctx.pattern, ctx.order)
        return result


class SparseUnwrap(torch.autograd.Function):
    """A sparsely stored tensor → its values. Tangents are stored in the tensor's pattern."""

    @staticmethod
    @never_compiled
    def forward(ctx: Any, tensor: SparselyStored) -> Tensor:
        keep(ctx, tensor._kept_validity)
        ctx.pattern, ctx.order = tensor._pattern, tensor._order
        ctx.set_materialize_grads(False)
        ctx.like = tensor._kept_values.new_empty(()).expand(tensor._kept_values.shape)
        return tensor._kept_values.detach()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        return closed_sparse(_in_order(Sparse(Dense(grad, ctx.saved_tensors[0]), ctx.pattern), ctx.order))

    @staticmethod
    @never_compiled
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return in_places(tangent, Sparse(Dense(ctx.like, ctx.validity), ctx.pattern), ctx.order)


def in_places(given: Tensor, record: Sparse, order: tuple[int, ...] | None) -> Tensor:
    """What a gradient or a tangent, stored anyhow, has for the values of `record`: 0 where it, or they, are invalid."""
    found = open_any(given)
    if order is not None:
        seen = Turned(record, order)
        alike = isinstance(found, Dense) or (isinstance(found, Turned) and found.order == order)
        found = turned_back(found if alike else to_dense(found), seen)
    there = values_at(to_dense(found) if isinstance(found, Turned) else found, record)
    validity = intersect(there.full_validity, record.values.full_validity)
    return fill_where_invalid(there.data.expand(record.values.shape), validity, 0)


def _in_order(record: Sparse, order: tuple[int, ...] | None) -> Sparse | Turned:
    return record if order is None else Turned(record, order)


def open_any(tensor: Tensor) -> AnyRecord:
    """The record of a tensor, however it is stored; differentiable."""
    if isinstance(tensor, SparselyStored):
        return opened_sparse(tensor)
    if isinstance(tensor, MaskedTensor):
        return opened(tensor)
    if tensor.layout in OF_TORCH:  # plain, so valid everywhere, and 0 where it specifies nothing: as on dense storage
        check_allowed("an operand", [tensor], "it is one of torch's own sparse tensors, valid everywhere")
        tensor = tensor.to_dense()
    return Dense(tensor, None)


def opened_sparse(tensor: SparselyStored) -> Sparse | Turned:
    """The record that a sparse run sees; its values carry the derivatives that are asked for."""
    check_in_sight(tensor, tensor._kept_values)
    if under_transform():
        if tensor.requires_grad and torch.is_grad_enabled():
            check_not_captured(tensor)
        # What is found out about a pattern in a transform carries it, and must not be remembered with the pattern.
        pattern = tensor._pattern
        stored = Dense(tensor._kept_values, tensor._kept_validity)
        return tensor.seen(Sparse(stored, pattern.with_pieces(pattern.pieces)))
    if not tensor.is_inference():
        tensor._kept.make_savable()
    if (tensor.requires_grad and torch.is_grad_enabled()) or in_forward_mode():
        return tensor.seen(Sparse(Dense(SparseUnwrap.apply(tensor), tensor._kept_validity), tensor._pattern))
    return tensor.record


def closed_sparse(record: Sparse | Turned) -> SparselyStored:
    """The masked tensor that a sparse record stands for."""
    order = None
    if isinstance(record, Turned):
        order, record = record.order, record.base
    values = record.values
    validity = values.full_validity
    validity = None if validity is None else as_int8(validity)
    if under_transform():
        kept = Sparse(Dense(fill_where_invalid(values.data, validity, 0), validity), record.pattern)
        return wrap_sparse(_in_order(kept, order), kind=SparseInTransform)
    if (values.data.requires_grad and torch.is_grad_enabled()) or in_forward_mode():
        result: SparselyStored = SparseWrap.apply(values.data, validity, record.pattern, order)
        return result
    return wrap_sparse(_in_order(Sparse(Dense(values.data, validity), record.pattern), order))
