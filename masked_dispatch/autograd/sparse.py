"""The differentiable boundary of sparse storage: as dense.py, for the values of a sparsity pattern.

The gradient of a sparsely stored tensor has the tensor's own pattern: absent where the tensor is invalid. The gradient
of a sparse result may arrive in any layout: its elements at the result's coordinates are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import (
    Boundary,
    Context,
    check_not_captured,
    check_usable,
    keep_validity,
    unwrap,
    wrap_record,
)
from masked_dispatch.autograd.reached import MASKED, carried, carry, narrowed, stored_densely
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.policies import check_allowed
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseInTransform, SparseMaskedTensor, wrap_sparse
from masked_dispatch.tensor.storage import Stored
from masked_dispatch.torch_internals import in_forward_mode, under_transform
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import Dense, map_tensors
from op_registry.records.fill import fill_where_invalid, zero_where_invalid
from op_registry.records.sums import broadcast_back
from op_registry.records.validity import as_int8, intersect
from op_registry.sparse.layout import OF_TORCH
from op_registry.sparse.on_values import align_to
from op_registry.sparse.permuted import AnyRecord, Permuted, sparse_dims_first, to_base_order, to_dense
from op_registry.sparse.record import NotLowered, Pattern, Sparse


class SparseContext(Context, Protocol):
    """What the functions below save: the pattern, the order of dimensions and the shape of the values."""

    pattern: Pattern
    order: tuple[int, ...] | None
    shape: torch.Size


class SparseWrap(Boundary):
    """Plain values → a masked tensor that stores them. Tangents are zero where a value is invalid."""

    @staticmethod
    @never_compiled
    def forward(
        ctx: SparseContext, values: Tensor, validity: Tensor | None, pattern: Pattern, order: tuple[int, ...] | None
    ) -> SparseMaskedTensor:
        keep_validity(ctx, validity)
        ctx.pattern, ctx.order = pattern, order
        ctx.shape = values.shape
        return wrap_sparse(_in_order(Sparse(Dense(values.detach(), validity), pattern), order))

    @staticmethod
    @never_compiled
    def backward(ctx: SparseContext, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        values, reached = aligned_values(grad, _like(grad, ctx), ctx.order)
        if ctx.call is not None and not torch.compiler.is_dynamo_compiling() and ctx.call.needs(ctx, grad):
            stored = _in_order(Sparse(Dense(values.detach(), reached), ctx.pattern), ctx.order)
            ctx.call.arrive(ctx, values, reached, reached is ctx.validity, stored)
        return values, None, None, None

    @staticmethod
    @never_compiled
    def jvp(ctx: SparseContext, tangent: Tensor, *_: object) -> SparseMaskedTensor:
        filled = fill_where_invalid(tangent, ctx.validity, 0)
        return SparseWrap.apply(filled, ctx.validity, ctx.pattern, ctx.order)


class SparseUnwrap(Boundary):
    """A sparsely stored tensor, and what it stores → its values. Tangents are stored in the tensor's pattern."""

    @staticmethod
    @never_compiled
    def forward(ctx: SparseContext, tensor: SparseMaskedTensor, stored: Stored) -> Tensor:
        keep_validity(ctx, stored.validity)
        ctx.pattern, ctx.order = stored.pattern, tensor._order
        ctx.shape = stored.values.shape
        return stored.values.detach()

    @staticmethod
    @never_compiled
    def backward(ctx: SparseContext, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        reached = None
        if ctx.call is not None and not torch.compiler.is_dynamo_compiling():
            of_stored = functools.partial(_of_stored, ctx)
            reached = ctx.call.reached(ctx.operand, ctx.validity, functools.partial(_reached_of, ctx), of_stored)
            grad = zero_where_invalid(grad, reached)
        masked = wrap_sparse_record(_in_order(Sparse(Dense(grad, ctx.validity), ctx.pattern), ctx.order))
        return (masked if reached is None else carry(masked, reached)), None

    @staticmethod
    @never_compiled
    def jvp(ctx: SparseContext, tangent: Tensor, _: None) -> Tensor:
        return values_at(tangent, _like(tangent, ctx), ctx.order)


def _reached_of(ctx: SparseContext, result: int, reached: Any) -> Tensor | None:
    """What of a sparse operand is reached, given what of a result is; of its values, if they are the result's too."""
    call, operand = ctx.call, ctx.operand
    assert call is not None
    if not isinstance(reached, Tensor):
        base, order = (reached.base, reached.order) if isinstance(reached, Permuted) else (reached, None)
        validity = base.values.full_validity
        same = base.pattern is ctx.pattern and order == ctx.order and base.values.ndim == len(ctx.shape)
        if same and (validity is None or call.elementwise):
            return None if validity is None else broadcast_back(validity, ctx.shape)
    dense = stored_densely(reached)
    return None if dense is None else _of_stored(ctx, call.of_operand(operand, result, dense))


def _of_stored(ctx: SparseContext, part: Tensor | None) -> Tensor | None:
    """What of an operand's stored values a part of the operand is; None for all of them."""
    if part is None:
        return None
    like = Sparse(Dense(part.new_empty(()).expand(ctx.shape), None), ctx.pattern)
    if ctx.order is not None:
        part = Permuted(like, ctx.order).to_base(part)
    return align_to(Dense(part.expand(like.shape)), like).data


def _like(tensor: Tensor, ctx: SparseContext) -> Sparse:
    """What a gradient or tangent of a tensor that a function has wrapped or unwrapped has to be aligned to."""
    like = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(ctx.shape)
    return Sparse(Dense(like, ctx.validity), ctx.pattern)


def values_at(tensor: Tensor, record: Sparse, order: tuple[int, ...] | None) -> Tensor:
    """The elements of a gradient or tangent, in any layout, for the values of `record`: 0 where either is invalid."""
    return aligned_values(tensor, record, order)[0]


def aligned_values(tensor: Tensor, record: Sparse, order: tuple[int, ...] | None) -> tuple[Tensor, Tensor | None]:
    """The same, and where they are valid, and reached."""
    source = unwrap_any(tensor)
    if type(tensor) in MASKED and tensor._reached is not None:  # type: ignore[attr-defined]
        source = narrowed(source, carried(tensor))
    stored = source.base if isinstance(source, Permuted) else source
    shown = source.order if isinstance(source, Permuted) else None
    if (
        isinstance(stored, Sparse)
        and stored.pattern is record.pattern
        and shown == order
        and stored.values.shape == record.values.shape
    ):
        validity = intersect(stored.values.full_validity, record.values.full_validity)
        return fill_where_invalid(stored.values.data, validity, 0), validity
    if order is not None:
        if not isinstance(source, Dense) and not (isinstance(source, Permuted) and source.order == order):
            assert isinstance(tensor, SparseMaskedTensor)
            check_allowed(
                "a gradient", [tensor], "the dimensions of the result that it belongs to are in another order"
            )
            source = to_dense(source)
        source = to_base_order(source, Permuted(record, order))
    aligned = align_to(in_stored_order("a gradient", tensor, source), record)
    validity = intersect(aligned.full_validity, record.values.full_validity)
    return fill_where_invalid(aligned.data.expand(record.values.shape), validity, 0), validity


def _in_order(record: Sparse, order: tuple[int, ...] | None) -> Sparse | Permuted:
    return record if order is None else Permuted(record, order)


def in_stored_order(operation: str, tensor: Tensor, record: AnyRecord) -> Dense | Sparse:
    """The record of `tensor` with its sparse dimensions first; where it has none, stored densely if that is allowed.

    operation  what it is stored densely for
    """
    if not isinstance(record, Permuted):
        return record
    try:
        return sparse_dims_first(record)
    except NotLowered as reason:
        check_allowed(operation, [tensor], str(reason))
        return to_dense(record)


def unwrap_any(tensor: Tensor) -> AnyRecord:
    """The record of a tensor in any layout; differentiable."""
    if isinstance(tensor, SparseMaskedTensor):
        return unwrap_sparse(tensor)
    if isinstance(tensor, MaskedTensor):
        return unwrap(tensor)
    return Dense(strided_operand(tensor), None)


def strided_operand(tensor: Tensor) -> Tensor:
    """An operand, a torch.sparse one stored densely: plain, so valid everywhere, and 0 where it specifies nothing."""
    if tensor.layout is torch.strided or tensor.layout not in OF_TORCH:
        return tensor
    if under_transform() and tensor.layout is not torch.sparse_coo:
        raise MaskedSemanticsError(
            f"a plain tensor of shape {tuple(tensor.shape)} stored as {tensor.layout} is an operand inside a "
            "torch.func transform, which only takes COO: torch has no strides for other layouts there. Convert it "
            "outside of the transform, operand.to_dense() or operand.to_sparse()."
        )
    check_allowed("an operand", [tensor], "it is a torch.sparse tensor, valid everywhere")
    return tensor.to_dense()


def strided_operands(args: Iterable[Any]) -> list[Any]:
    """The arguments of a call, in which, lists included, torch.sparse tensors are stored densely."""
    return [map_tensors(strided_operand, a, Tensor) for a in args]


def unwrap_sparse(tensor: SparseMaskedTensor) -> Sparse | Permuted:
    """The record that a lowering sees; its values are connected to the autograd graph if derivatives are needed."""
    check_usable(tensor, tensor._kept_values)
    if under_transform():
        if tensor.requires_grad and torch.is_grad_enabled():
            check_not_captured(tensor)
        # What is computed from a pattern in a transform carries it, and must not be memoized on the pattern.
        values, validity, pattern = tensor._kept.copied()
        return tensor.permuted_like_self(Sparse(Dense(values, validity), pattern.with_pieces(pattern.pieces)))
    if not tensor.is_inference():
        tensor._kept.make_savable()
    if (tensor.requires_grad and torch.is_grad_enabled()) or in_forward_mode():
        stored = tensor._kept.copied()
        connected = Dense(SparseUnwrap.apply(tensor, stored), stored.validity)
        return tensor.permuted_like_self(Sparse(connected, stored.pattern))
    return tensor.record


def wrap_sparse_record(record: Sparse | Permuted) -> SparseMaskedTensor:
    """The masked tensor of a sparse record."""
    given, order, extent = record, None, record.extent
    if isinstance(record, Permuted):
        order, record = record.order, record.base
    values = record.values
    validity = values.full_validity
    validity = None if validity is None else as_int8(validity)
    if under_transform():
        filled = Sparse(Dense(fill_where_invalid(values.data, validity, 0), validity), record.pattern)
        return with_extent(wrap_sparse(_in_order(filled, order), kind=SparseInTransform), extent)
    if (values.data.requires_grad and torch.is_grad_enabled()) or in_forward_mode():
        result: SparseMaskedTensor = SparseWrap.apply(values.data, validity, record.pattern, order)
        return with_extent(result, extent)
    return wrap_sparse(given)


def wrap_any(record: AnyRecord) -> MaskedTensor:
    """The masked tensor of a record."""
    return wrap_record(record) if isinstance(record, Dense) else wrap_sparse_record(record)
