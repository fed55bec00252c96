"""The differentiable boundary between a masked tensor and the plain tensors that rules compute on.

``Unwrap``: masked → plain data. ``Wrap``: plain data → masked. Between them autograd sees plain torch operators, so
every derivative is that of the masked computation. Two conventions make gradients correct:

* the gradient of a masked tensor gets that tensor's mask (``Unwrap.backward``);
* the gradient of a masked result is zero wherever the result, or the gradient itself, is invalid (``Wrap.backward``).

Neither is used inside functorch transforms: there the inner tensors carry the transform themselves, and every masked
result is filled with zeros under its mask, so that no derivative passes through invalid elements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from masked_dispatch.autograd.reached import Call, Operand, carried, carry, narrowed, stored_densely
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.engine_internals import carries_older_vmap
from masked_dispatch.tensor.in_transform import InTransform, check_alive, wrap_in_transform
from masked_dispatch.tensor.mask_sharing import shared_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.messages import passed_to_torch_func
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    apply_outside_of_functorch,
    hidden_in_transform,
    in_forward_mode,
    plain_eager,
    recorded_as_constant,
    recording,
    transform_or_forward_mode,
    under_transform,
)
from op_registry import MaskedSemanticsError
from op_registry.older_torch import derivatives_are_lost
from op_registry.records.arguments import with_leading_dims
from op_registry.records.dense import Dense, same_sizes
from op_registry.records.fill import OwnFunction, fill_where_invalid, hand_on, zero_where_invalid
from op_registry.records.tracing import being_traced, savable, traced_elsewhere
from op_registry.records.validity import as_int8, intersect, is_same_memory
from op_registry.sparse.record import Pattern


class Context(Protocol):
    """What an autograd function keeps in forward for its derivatives."""

    validity: Tensor | None
    call: Call | None
    operand: Operand
    pattern: Pattern | None
    order: tuple[int, ...] | None

    def set_materialize_grads(self, value: bool) -> None: ...


class Boundary(OwnFunction):
    """A function between masked and plain tensors: its `apply` omits what torch's does for functorch."""

    apply = apply_outside_of_functorch


class Wrap(Boundary):
    """Plain data and validity → masked tensor. Tangents are zero where invalid."""

    @staticmethod
    @never_compiled
    def forward(ctx: Context, data: Tensor, validity: Tensor | None) -> MaskedTensor:
        keep_validity(ctx, validity)
        own = in_layout_of_gradient(_alias(data))
        hand_on(data, own, validity)
        return wrap(own, validity)

    @staticmethod
    @never_compiled
    def backward(ctx: Context, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if ctx.call is None or torch.compiler.is_dynamo_compiling() or not ctx.call.needs(ctx, grad):
            return plain_gradient(grad, ctx.validity), None
        reached = intersect(ctx.validity, reached_by(grad))
        plain = plain_gradient(grad, reached)
        ctx.call.arrive(ctx, plain, reached, reached is ctx.validity)
        return plain, None

    @staticmethod
    @never_compiled
    def jvp(ctx: Context, tangent: Tensor, _: object) -> MaskedTensor:
        check_single_tangent(tangent)
        return Wrap.apply(fill_where_invalid(tangent, ctx.validity, 0), ctx.validity)


class Unwrap(Boundary):
    """Masked tensor → its plain data, as stored. Tangents get the tensor's mask."""

    @staticmethod
    @never_compiled
    def forward(ctx: Context, tensor: MaskedTensor, validity: Tensor | None) -> Tensor:
        keep_validity(ctx, validity)
        data = in_layout_of_gradient(_alias(tensor._data))
        hand_on(tensor._data, data, validity)
        return data

    @staticmethod
    @never_compiled
    def backward(ctx: Context, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if ctx.call is None or torch.compiler.is_dynamo_compiling():
            return masked_gradient(grad, ctx.validity), None
        reached = ctx.call.reached(ctx.operand, ctx.validity, functools.partial(_reached_of, ctx))
        if not ctx.call.passes_zeros:
            grad = zero_where_invalid(grad, reached)
        return carry(masked_gradient(grad, ctx.validity), reached), None

    @staticmethod
    @never_compiled
    def jvp(ctx: Context, tangent: Tensor, _: None) -> Tensor:
        check_single_tangent(tangent)
        return plain_gradient(tangent, ctx.validity)


class Beside(Boundary):
    """A plain operand beside a masked one → the same data. What the call reached matters to its gradient too."""

    @staticmethod
    @never_compiled
    def forward(ctx: Context, tensor: Tensor) -> Tensor:
        keep_validity(ctx, None)
        return _alias(tensor)

    @staticmethod
    @never_compiled
    def backward(ctx: Context, grad: Tensor | None) -> Tensor | None:
        if grad is None or ctx.call is None or torch.compiler.is_dynamo_compiling():
            return grad
        reached = ctx.call.reached(ctx.operand, None, functools.partial(_reached_of, ctx))
        return zero_where_invalid(grad, reached)

    @staticmethod
    @never_compiled
    def jvp(ctx: Context, tangent: Tensor) -> Tensor:
        return _alias(tangent)


def follow_plain(args: Sequence[Any], records: list[Any]) -> None:
    """Let the node of a call know the gradients of plain operands, if its formula multiplies gradients with values.

    (An operand of any other formula is shared by many elements, and gets a sum of what all of them contribute.)
    """
    for n, value in enumerate(args):
        if isinstance(value, Tensor) and not isinstance(value, MaskedTensor) and value.requires_grad:
            data = records[n].data
            if torch.is_grad_enabled() and not under_transform() and not traced_elsewhere(data):
                records[n] = Dense(Beside.apply(data), None)


def _alias(data: Tensor) -> Tensor:
    """The data as another tensor, for autograd. ``detach`` of another library's tensor would end its own derivative."""
    return data.detach() if type(data) is Tensor else torch.ops.aten.detach.default(data)


def check_single_tangent(tangent: Tensor) -> None:
    """Refuse a batch of tangents of torch's older vmap, which has no views of them."""
    inner = tangent._data if isinstance(tangent, MaskedTensor) else tangent
    if carries_older_vmap(inner):
        raise MaskedSemanticsError(
            "torch.autograd.functional.jacobian(vectorize=True, strategy='forward-mode') batches tangents in a way "
            "that autograd functions cannot take. Use masked_dispatch.functional.jacfwd(f)(x), or "
            "strategy='reverse-mode'."
        )


def in_layout_of_gradient(data: Tensor) -> Tensor:
    """Contiguous data in forward mode, which gives tangents the strides of the primal and fails for stride 0."""
    return data.contiguous() if in_forward_mode() and 0 in data.stride() else data


def keep_validity(ctx: Context, validity: Tensor | None) -> None:
    """Keep the validity for reverse and forward mode.

    Not by `save_for_backward`: torch frees tensors saved in that way during the first backward. A second backward
    through this node would then raise, although plain torch, whose operator saves nothing, allows it. Nobody writes to
    a validity that is shared.
    """
    ctx.validity, ctx.call, ctx.pattern, ctx.order = validity, None, None, None
    ctx.set_materialize_grads(False)


def plain_gradient(grad: Tensor, validity: Tensor | None) -> Tensor:
    """A gradient as a plain tensor, zero wherever it or `validity` is invalid."""
    if torch.compiler.is_dynamo_compiling():  # compiled autograd: one operator in the graph
        return torch.ops.masked_dispatch.plain_gradient(grad, validity)
    if type(grad) is MaskedTensor and not grad.requires_grad and plain_eager():
        own = grad._stored_validity if grad._family is None else savable_validity(grad)
        return zero_where_invalid(grad._data, intersect(validity, own))
    if isinstance(grad, MaskedTensor):
        record = unwrap(grad._stored_densely())
        return zero_where_invalid(record.data, intersect(validity, record.validity))
    return fill_where_invalid(grad, validity, 0)  # a root that the caller gave, in memory of the caller's


def masked_gradient(grad: Tensor, validity: Tensor | None) -> Tensor:
    """A gradient under the mask of the tensor it belongs to: invalid, not zero, where that is invalid."""
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.masked_dispatch.masked_gradient(grad, validity)
    if isinstance(grad, MaskedTensor):
        grad = grad._stored_densely()
        if grad._validity is validity:
            return grad
        grad = data_under(grad, validity)
    return wrap_record(Dense(grad, validity))


def _reached_of(ctx: Context, result: int, reached: Any) -> Tensor | None:
    """What of a dense operand is reached, given what of a result is; None for everything."""
    dense = stored_densely(reached)
    assert ctx.call is not None
    return None if dense is None else ctx.call.of_operand(ctx.operand, result, dense)


def reached_by(grad: Tensor) -> Tensor | None:
    """What a gradient reached; int8 that broadcasts to it, None for everything."""
    if not isinstance(grad, MaskedTensor):
        return None
    if isinstance(grad, SparseMaskedTensor):
        return stored_densely(narrowed(grad._printed_record, carried(grad)))
    return intersect(grad._validity, carried(grad))


def data_under(grad: Tensor, validity: Tensor | None) -> Tensor:
    """A gradient as a plain tensor: as it is stored if its mask is `validity`, else zero where it is invalid."""
    if not torch.compiler.is_dynamo_compiling() and isinstance(grad, MaskedTensor):
        record = unwrap(grad._stored_densely())
        if record.validity is validity or is_same_memory(record.validity, validity):
            return record.data
        return zero_where_invalid(record.data, record.validity)
    return plain_gradient(grad, None)


def unwrap(tensor: MaskedTensor) -> Dense:
    """The record that a rule sees; its data is connected to the autograd graph if derivatives are needed."""
    eager = plain_eager() and not isinstance(tensor, InTransform)
    if not eager:
        check_usable(tensor, tensor._data)
    validity = savable_validity(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        if not eager:
            check_not_captured(tensor)
        return Dense(Unwrap.apply(tensor, validity), validity, tensor._extent)
    if not eager and in_forward_mode() and not under_transform():
        return Dense(Unwrap.apply(tensor, validity), validity, tensor._extent)
    return Dense(tensor._data, validity, tensor._extent)


def savable_validity(tensor: MaskedTensor) -> Tensor | None:
    """The validity as a tensor that may be saved for backward, unless `tensor` itself is an inference tensor."""
    validity = shared_validity(tensor)
    return validity if validity is None or tensor.is_inference() else savable(validity)


def check_usable(tensor: MaskedTensor, values: Tensor) -> None:
    """Refuse a tensor that a transform wraps without its mask, records without its `values`, or has outlived."""
    if plain_eager() and not isinstance(tensor, InTransform):
        return  # (none of the following)
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        # (without the shape, whose sizes are tensors here)
        raise MaskedSemanticsError(
            "torch.jit.trace records a function of a masked tensor, and its graph would have neither the mask nor the "
            "rules. Use torch.compile(f), or torch.export of a function that takes data and mask, makes "
            "as_masked_tensor(data, mask) inside and returns y.to_tensor(fill) (and y.get_mask())."
        )
    if hidden_in_transform():
        raise MaskedSemanticsError(passed_to_torch_func(tensor))
    if in_forward_mode() and recording():
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(tensor.shape)} is used in a function that torch.func.linearize records: "
            "the graph would have neither its mask nor its derivative. Use masked_dispatch.functional.jvp."
        )
    if isinstance(tensor, InTransform):
        check_alive(tensor)
    if recorded_as_constant(values, tensor):
        raise MaskedSemanticsError(
            f"make_fx is given a masked tensor of shape {tuple(tensor.shape)} and would record its data and mask as "
            "constants. Let the function take data and mask, and make the masked tensor inside with "
            "as_masked_tensor(data, mask)."
        )


def check_not_captured(tensor: MaskedTensor) -> None:
    """Refuse a tensor that requires grad and is captured by a transform, which would not differentiate it."""
    if under_transform():
        raise MaskedSemanticsError(
            f"a masked tensor of shape {tuple(tensor.shape)} that requires grad is used inside a torch.func "
            "transform that it was not an argument of. Pass it as an argument of masked_dispatch.functional's "
            "transforms, or detach it."
        )


def wrap_record(record: Dense) -> MaskedTensor:
    """The masked tensor of a record that a rule returned."""
    data, validity = record.data, checked_validity(record)
    derived = transform_or_forward_mode()
    if derived and under_transform():
        if derivatives_are_lost():
            raise MaskedSemanticsError(
                f"a masked tensor of shape {tuple(data.shape)} is computed inside a transform of torch.func (grad, "
                f"vjp, jvp ...) in inference mode, where derivatives are silent zeros in torch {torch.__version__}. "
                "Use the transform of the same name from masked_dispatch.functional, or call torch's under "
                "torch.inference_mode(False)."
            )
        # The inner tensor carries the derivative: the fill stops gradients of invalid elements.
        result: MaskedTensor = wrap_in_transform(fill_where_invalid(data, validity, 0), validity)
    else:
        if type(data) is not Tensor and traced_elsewhere(data):
            data = fill_where_invalid(data, validity, 0)  # likewise
        if derived or (data.requires_grad and torch.is_grad_enabled()):
            result = Wrap.apply(data, validity)
        else:
            result = wrap(data, validity)
    return result if record.extent is None else with_extent(result, record.extent)


def checked_validity(record: Dense) -> Tensor | None:
    """A record's validity as stored: int8, with the data's number of dimensions, each of the data's size or 1."""
    validity = record.validity
    if validity is None:
        return None
    if validity.dtype is torch.bool:
        validity = as_int8(validity)
    if validity.dtype is not torch.int8:
        raise MaskedSemanticsError(f"a rule returned a validity of dtype {validity.dtype}; it has to be bool")
    shape = record.data.shape
    if same_sizes(validity.shape, shape) if being_traced(record.data) else validity.shape == shape:
        return validity
    missing_dims = len(shape) - validity.ndim
    if missing_dims > 0:
        validity = with_leading_dims(validity, missing_dims)
    if missing_dims < 0 or not all(_goes_with(v, n) for v, n in zip(validity.shape, shape, strict=True)):
        raise MaskedSemanticsError(
            f"a rule returned values of shape {tuple(shape)} with a validity of shape {tuple(validity.shape)}, which "
            "does not broadcast to them; return x.like(values) only where values keep the shape of x"
        )
    return validity


def _goes_with(size: int, data_size: int) -> bool:
    """Whether a size of a validity is the data's or 1. A graph does not know whether one that depends on data is 1."""
    return (type(size) is int and size == 1) or size == data_size or size == 1
