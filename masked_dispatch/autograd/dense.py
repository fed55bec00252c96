"""The differentiable boundary between a masked tensor and the plain tensors that rules compute on.

``Unwrap`` opens (masked → plain data), ``Wrap`` closes (plain data → masked). Between them autograd sees plain torch,
so every derivative is that of the masked computation. The two conventions that make gradients right:

* what flows into a masked tensor is masked with that tensor's mask (``Unwrap.backward``);
* what leaves a masked result is zero wherever the result, or the gradient itself, is invalid (``Wrap.backward``).

Inside functorch transforms neither is used: there the inner tensors carry the transform themselves, and every masked
result is filled with zeros under its mask, so that no derivative passes there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from masked_dispatch.tensor.mask_sharing import shared_validity
from masked_dispatch.tensor.masked_tensor import InTransform, MaskedTensor, check_alive, wrap, wrap_in_transform
from masked_dispatch.tensor.messages import handed_to_torch_func, linearized
from masked_dispatch.torch_internals import (
    hidden_in_transform,
    in_forward_mode,
    never_compiled,
    recorded_as_constant,
    recording,
    under_transform,
)
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense, fill_where_invalid
from op_registry.records.tracing import savable
from op_registry.records.validity import as_int8, intersect


class Wrap(torch.autograd.Function):
    """Plain data and validity → masked tensor. Tangents are zero outside the mask."""

    @staticmethod
    @never_compiled
    def forward(ctx: Any, data: Tensor, validity: Tensor | None) -> MaskedTensor:
        save_validity(ctx, validity)
        return wrap(in_layout_of_gradient(data.detach()), validity)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None if grad is None else plain_gradient(grad, ctx.saved_tensors[0])), None

    @staticmethod
    @never_compiled
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> MaskedTensor:
        result: MaskedTensor = Wrap.apply(fill_where_invalid(tangent, ctx.validity, 0), ctx.validity)
        return result


class Unwrap(torch.autograd.Function):
    """Masked tensor → its plain data, as stored. Tangents get the tensor's mask."""

    @staticmethod
    @never_compiled
    def forward(ctx: Any, tensor: MaskedTensor) -> Tensor:
        save_validity(ctx, _savable_validity(tensor))
        return in_layout_of_gradient(tensor._data.detach())

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else masked_gradient(grad, ctx.saved_tensors[0])

    @staticmethod
    @never_compiled
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return plain_gradient(tangent, ctx.validity)


def in_layout_of_gradient(data: Tensor) -> Tensor:
    """Forward mode gives a tangent the strides of its primal, and cannot write through those that repeat elements."""
    return data.contiguous() if in_forward_mode() and 0 in data.stride() else data


def save_validity(ctx: Any, validity: Tensor | None) -> None:
    """What both directions of differentiation need to know."""
    ctx.save_for_backward(validity)
    ctx.set_materialize_grads(False)
    if in_forward_mode():
        ctx.validity = validity


def plain_gradient(grad: Tensor, validity: Tensor | None) -> Tensor:
    """A gradient as plain tensor that is zero wherever it is invalid or `validity` says so."""
    if torch.compiler.is_dynamo_compiling():  # compiled autograd: one operator in its graph
        filled: Tensor = torch.ops.masked_dispatch.plain_gradient(grad, validity)
        return filled
    if isinstance(grad, MaskedTensor):
        record = unwrap(grad._stored_densely())
        return fill_where_invalid(record.data, intersect(validity, record.validity), 0)
    return fill_where_invalid(grad, validity, 0)


def masked_gradient(grad: Tensor, validity: Tensor | None) -> Tensor:
    """A gradient under the mask that the tensor it belongs to has: absent, not zero, where that is invalid."""
    if torch.compiler.is_dynamo_compiling():
        masked: Tensor = torch.ops.masked_dispatch.masked_gradient(grad, validity)
        return masked
    if isinstance(grad, MaskedTensor):
        grad = grad._stored_densely()
        if grad._validity is validity:
            return grad
        grad = plain_gradient(grad, None)
    return wrap_record(Dense(grad, validity))


def unwrap(tensor: MaskedTensor) -> Dense:
    """The record that a rule sees; its data carries the derivatives that are asked for."""
    check_in_sight(tensor, tensor._data)
    validity = _savable_validity(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        check_not_captured(tensor)
        return Dense(Unwrap.apply(tensor), validity)
    if in_forward_mode() and not under_transform():
        return Dense(Unwrap.apply(tensor), validity)
    return Dense(tensor._data, validity)


def _savable_validity(tensor: MaskedTensor) -> Tensor | None:
    """The validity, which may be saved for a backward unless the tensor itself, made in inference mode, may not."""
    validity = shared_validity(tensor)
    return validity if validity is None or tensor.is_inference() else savable(validity)


def check_in_sight(tensor: MaskedTensor, values: Tensor) -> None:
    """Refuse what a transform wraps as it is, or records without what it holds (`values`), or has left behind."""
    if hidden_in_transform():
        raise MaskedSemanticsError(handed_to_torch_func(tensor))
    if in_forward_mode() and recording():
        raise MaskedSemanticsError(linearized(tensor))
    if isinstance(tensor, InTransform):
        check_alive(tensor)
    if recorded_as_constant(values, tensor):
        raise MaskedSemanticsError(
            f"make_fx is given a masked tensor of shape {tuple(tensor.shape)} and would record what it holds as "
            "constants. Let the function take data and mask, and make the masked tensor inside with "
            "as_masked_tensor(data, mask)."
        )


def check_not_captured(tensor: MaskedTensor) -> None:
    """Refuse, inside a transform, a tensor whose derivatives it does not know of."""
    if under_transform():
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(tensor.shape)} that requires grad is used inside a torch.func "
            "transform that it was not an argument of. Hand it in as an argument of masked_dispatch.functional's "
            "transforms, or detach it."
        )


def wrap_record(record: Dense) -> MaskedTensor:
    """The masked tensor that a rule's record stands for."""
    data, validity = record.data, checked_validity(record)
    if under_transform():
        # The inner tensor carries the derivative: what would come back for invalid elements is stopped by a fill.
        return wrap_in_transform(fill_where_invalid(data, validity, 0), validity)
    if (data.requires_grad and torch.is_grad_enabled()) or in_forward_mode():
        result: MaskedTensor = Wrap.apply(data, validity)
        return result
    return wrap(data, validity)


def checked_validity(record: Dense) -> Tensor | None:
    """A record's validity as it is stored: int8, as many dimensions as the data, each of its size or 1."""
    validity = record.validity
    if validity is None:
        return None
    if validity.dtype is torch.bool:
        validity = as_int8(validity)
    if validity.dtype is not torch.int8:
        raise MaskedSemanticsError(f"a rule gave a validity of dtype {validity.dtype}; it has to be bool")
    shape = record.data.shape
    if validity.shape == shape:
        return validity
    missing = len(shape) - validity.ndim
    if missing > 0:
        validity = validity[(None,) * missing]
    if missing < 0 or any(v not in (1, n) for v, n in zip(validity.shape, shape, strict=True)):
        raise MaskedSemanticsError(
            f"a rule gave values of shape {tuple(shape)} with a validity of shape {tuple(validity.shape)}, which does "
            "not broadcast to them; return x.like(values) only where values keep the shape of x"
        )
    return validity
