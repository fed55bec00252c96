"""Gradients of masked tensors in other projects' code: autograd functions, hooks, and assignments to `.grad` (P5).

An autograd function of another project gets plain gradients and tangents, 0 where invalid: a backward is linear, so an
invalid element contributes nothing. Its author may accumulate them, write into them, or pass them to NumPy. A gradient
that the function returns for a masked tensor gets that tensor's mask before other code sees it. For this, a call with
masked tensors runs a class derived from the function's class, which is created once.

Hooks get masked gradients. A gradient that a hook returns is masked likewise, and so is any gradient stored as `.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from masked_dispatch.autograd.dense import masked_gradient, savable_validity
from masked_dispatch.autograd.sparse import values_at, wrap_sparse_record
from masked_dispatch.compiler_internals import never_compiled, not_compiled
from masked_dispatch.engine_internals import HAND_GRADIENTS_ON, become_node_of, call_functions_by, leaf_accumulated_into
from masked_dispatch.interop.torch_sparse import from_torch_sparse
from masked_dispatch.tensor.checks import is_given_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import in_forward_mode, plain_eager, under_transform
from op_registry.records.dense import Dense
from op_registry.sparse.layout import OF_TORCH
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse


class Mask(NamedTuple):
    """The mask of a tensor, for its gradients; it does not keep the tensor's values.

    validity  for dense storage, the validity
    stored    for sparse storage, the record without values, in visible order
    """

    shape: torch.Size
    validity: Tensor | None
    stored: Sparse | Permuted | None

    @classmethod
    def of(cls, tensor: MaskedTensor) -> Mask:
        """Keep the current mask; later writes to the tensor do not change it."""
        if not isinstance(tensor, SparseMaskedTensor):
            return cls(tensor.shape, savable_validity(tensor), None)
        if not tensor.is_inference():
            tensor._kept.make_savable()
        values = tensor._kept_values
        like = values.new_empty(()).expand(values.shape)
        stored = tensor.permuted_like_self(Sparse(Dense(like, tensor._kept_validity), tensor._pattern))
        return cls(tensor.shape, None, stored)

    def on(self, gradient: Tensor) -> Tensor:
        """Mask a gradient, 0 where it has no value; differentiable. Gradients of other shapes are left to torch."""
        if gradient.shape != self.shape:
            gradient = plain(gradient)
            if torch.broadcast_shapes(self.shape, gradient.shape) != gradient.shape:
                return gradient
            gradient = gradient.sum_to_size(self.shape)
        if gradient.layout in OF_TORCH:
            gradient = from_torch_sparse(gradient)
        if self.stored is None:
            return masked_gradient(gradient, self.validity)
        order = self.stored.order if isinstance(self.stored, Permuted) else None
        base = self.stored.base if isinstance(self.stored, Permuted) else self.stored
        values = Dense(values_at(gradient, base, order), base.values.validity)
        record = base.like(values)
        return wrap_sparse_record(record if order is None else Permuted(record, order))


def plain(gradient: Any) -> Any:
    """Convert a masked gradient or tangent to a plain tensor, 0 where it is invalid; return other values unchanged.

    A gradient in one of torch's sparse layouts becomes a torch.sparse tensor, any other a strided one.
    """
    if not isinstance(gradient, MaskedTensor):
        return gradient
    return gradient.to_tensor(0) if in_torch_sparse(gradient) is None else gradient.to_torch_sparse(0)


def in_torch_sparse(result: MaskedTensor) -> str | None:
    """Say why a graph cannot hold plain gradients of a result: they are torch.sparse tensors. None if it can."""
    if not isinstance(result, SparseMaskedTensor) or result.storage_layout not in OF_TORCH:
        return None
    return (
        f"an autograd function gets the gradient of a result stored as {result.storage_layout} as a torch.sparse "
        "tensor, which torch does not compile: the function runs uncompiled. For fullgraph=True let it return "
        "y.to_dense()."
    )


# -------------------------------------------------------------------------------------------------- autograd functions

_MASKS = "_masked_dispatch_masks"
_COUNTERPART = "_masked_dispatch_counterpart"


@not_compiled
def _called(apply: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an autograd function through `apply`, torch's own call."""
    if under_transform() or not (torch.is_grad_enabled() or in_forward_mode()):
        return apply(function, *args, **kwargs)
    if is_given_masked(*args, **kwargs):
        knows = function.__module__.startswith(HAND_GRADIENTS_ON)
        return apply(function if knows else _counterpart(function), *args, **kwargs)
    results = apply(function, *args, **kwargs)
    for result in _listed(results):
        made = isinstance(result, MaskedTensor)  # from plain operands
        if made and become_node_of(result.grad_fn, function, _counterpart(function)):
            setattr(result.grad_fn, _MASKS, ((), ()))
    return results


@never_compiled
def _counterpart(function: Any) -> Any:
    """Derive a class whose backward and jvp pass plain tensors to the function's own, and mask their results."""
    made = function.__dict__.get(_COUNTERPART)
    if made is None:
        members = {
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
            "__doc__": function.__doc__,
        }
        made = type(function)(function.__name__, (function,), {**members, **_members(function)})
        setattr(function, _COUNTERPART, made)
    return made


def _members(function: Any) -> dict[str, Any]:
    base = torch.autograd.Function

    @functools.wraps(function.forward)
    @never_compiled
    def forward(ctx: Any, *args: Any) -> Any:
        masks = _masks_of(args)
        outputs = function.forward(ctx, *args)
        setattr(ctx, _MASKS, (masks, _masks_of(_listed(outputs))))
        return outputs

    @never_compiled
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setattr(ctx, _MASKS, (_masks_of(inputs), _masks_of(_listed(output))))
        function.setup_context(ctx, inputs, output)

    @never_compiled
    def backward(ctx: Any, *grads: Any) -> Any:
        if getattr(function, "boxed_grads_call", False):
            grads[0][:] = [plain(grad) for grad in grads[0]]
        else:
            grads = tuple(plain(grad) for grad in grads)
        given = function.backward if function.vjp is base.vjp else function.vjp
        return tuple(_under_masks(_listed(given(ctx, *grads)), getattr(ctx, _MASKS)[0]))

    @never_compiled
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given = [plain(tangent) for tangent in tangents]
        found = function.jvp(ctx, *given)
        results = _listed(found)
        masked = zip(results, _under_masks(results, getattr(ctx, _MASKS)[1]), strict=True)
        viewed = tuple(_same_view(result, given, tangents, masked=other) for result, other in masked)
        return viewed if isinstance(found, (tuple, list)) else viewed[0]

    members: dict[str, Any] = {"backward" if function.vjp is base.vjp else "vjp": staticmethod(backward)}
    if function.setup_context is base.setup_context:
        members["forward"] = staticmethod(forward)
    else:
        members["setup_context"] = staticmethod(setup_context)
    if function.jvp is not base.jvp:
        members["jvp"] = staticmethod(jvp)
    return members


def _same_view(result: Any, given: Sequence[Any], tangents: Sequence[Any], masked: Any) -> Any:
    """Return the same view of a masked tangent, which torch requires, if a tangent is a view; otherwise `masked`.

    given  the plain tangents that the jvp received for the masked `tangents`
    """
    base = result._base if isinstance(result, Tensor) else None
    for inside, outside in zip(given, tangents, strict=True):
        if base is None or type(outside) is not MaskedTensor or inside.stride() != outside.stride():
            continue
        if base is inside or base is inside._base:
            start = result.storage_offset() - inside.storage_offset() + outside.storage_offset()
            return outside.as_strided(result.shape, result.stride(), start)
    return masked


def _listed(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _masks_of(values: tuple[Any, ...]) -> tuple[Mask | None, ...]:
    return tuple(Mask.of(value) if isinstance(value, MaskedTensor) else None for value in values)


def _under_masks(gradients: tuple[Any, ...], masks: tuple[Mask | None, ...]) -> Iterator[Any]:
    """Yield gradients under these masks; plain tensors get plain gradients, or COO ones, which torch accepts."""
    for place, gradient in enumerate(gradients):
        mask = masks[place] if place < len(masks) else None
        if mask is not None and isinstance(gradient, Tensor):
            yield mask.on(gradient)
        elif isinstance(gradient, MaskedTensor) and gradient.storage_layout is not torch.sparse_coo:
            yield gradient.to_tensor(0)
        else:
            yield gradient


# --------------------------------------------------------------------------------------------------- hooks and `.grad`


def _register_hook(tensor: MaskedTensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Replace torch.Tensor.register_hook: the hook gets a masked gradient, and its result gets the tensor's mask."""
    noted = None if tensor.is_leaf else Mask.of(tensor)

    @functools.wraps(hook)
    def hooked(gradient: Tensor) -> Tensor | None:
        mask = noted
        if mask is None:
            leaf = leaf_accumulated_into()  # use its current mask
            assert isinstance(leaf, MaskedTensor)
            mask = Mask.of(leaf)
        given = gradient if isinstance(gradient, MaskedTensor) else mask.on(gradient)
        found = hook(given)
        if found is None:
            return None if given is gradient else given
        return mask.on(found) if isinstance(found, Tensor) else found

    return torch.Tensor.register_hook(tensor, hooked)


_stored: Any = torch.Tensor.grad


@never_compiled
def _grad(tensor: MaskedTensor) -> Tensor | None:
    """Return the gradient under the tensor's mask, even if a module hook or a caller has assigned it."""
    gradient: Tensor | None = _stored.__get__(tensor)
    if gradient is None or isinstance(gradient, MaskedTensor) or not plain_eager():
        return gradient
    with torch.set_grad_enabled(gradient.requires_grad):
        masked = Mask.of(tensor).on(gradient)
    _stored.__set__(tensor, masked)
    return masked


def install() -> None:
    """The package calls this once, on import."""
    call_functions_by(_called, is_given_masked)
    functools.update_wrapper(_register_hook, torch.Tensor.register_hook)
    MaskedTensor.register_hook = never_compiled(_register_hook)  # type: ignore[method-assign, assignment]
    MaskedTensor.grad = property(_grad, _stored.__set__, _stored.__delete__)  # type: ignore[assignment]
