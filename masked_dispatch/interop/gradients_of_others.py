"""What others do with gradients of masked tensors: autograd functions, hooks, and whoever sets `.grad` (P5).

An autograd function that is not this project's gets plain gradients and tangents, in which absent is 0: a backward is
linear, and what is absent contributes nothing. Its author may add them step by step, write into them, or give them to
NumPy. What it gives back for a masked tensor gets that tensor's mask, before anyone sees it. To this end a call with
masked tensors is made as a call of a class derived from the function's, which is made once.

Hooks get masked gradients. What they give back is masked likewise, and so is what anyone stores as `.grad`.
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
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import in_forward_mode, plain_eager, under_transform
from op_registry.records.dense import Dense
from op_registry.sparse.layout import OF_TORCH
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import Sparse


class Mask(NamedTuple):
    """The mask of a tensor, for its gradients: without its values.

    validity  of a dense tensor
    stored    for sparse storage, the record without values, in visible order
    """

    shape: torch.Size
    validity: Tensor | None
    stored: Sparse | Permuted | None

    @classmethod
    def of(cls, tensor: MaskedTensor) -> Mask:
        """The mask as it is now; later writes to the tensor do not change it."""
        if not isinstance(tensor, SparseMaskedTensor):
            return cls(tensor.shape, savable_validity(tensor), None)
        if not tensor.is_inference():
            tensor._kept.make_savable()
        values = tensor._kept_values
        like = values.new_empty(()).expand(values.shape)
        stored = tensor.permuted_like_self(Sparse(Dense(like, tensor._kept_validity), tensor._pattern))
        return cls(tensor.shape, None, stored)

    def on(self, gradient: Tensor) -> Tensor:
        """A gradient under this mask, 0 where it says nothing; differentiable. Other shapes are left to torch."""
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
    """A masked gradient or tangent as a plain tensor, 0 where it is invalid: in a layout of torch's sparse tensors as
    one of those, else with every element. Anything else as it is.
    """
    if not isinstance(gradient, MaskedTensor):
        return gradient
    return gradient.to_tensor(0) if in_torch_sparse(gradient) is None else gradient.to_torch_sparse(0)


def in_torch_sparse(result: MaskedTensor) -> str | None:
    """Why no graph has plain gradients of a result: they are torch.sparse tensors. None if they are not."""
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


def _is_given_masked(function: Any, *args: Any, **kwargs: Any) -> bool:
    return any(isinstance(argument, MaskedTensor) for argument in (*args, *kwargs.values()))


@not_compiled
def _called(apply: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of an autograd function, with torch's own way to make it."""
    if under_transform() or not (torch.is_grad_enabled() or in_forward_mode()):
        return apply(function, *args, **kwargs)
    if _is_given_masked(function, *args, **kwargs):
        knows = function.__module__.startswith(HAND_GRADIENTS_ON)
        return apply(function if knows else _counterpart(function), *args, **kwargs)
    results = apply(function, *args, **kwargs)
    for result in _listed(results):
        made = isinstance(result, MaskedTensor)  # of plain tensors
        if made and become_node_of(result.grad_fn, function, _counterpart(function)):
            setattr(result.grad_fn, _MASKS, ((), ()))
    return results


@never_compiled
def _counterpart(function: Any) -> Any:
    """A class derived from a function's, whose derivatives have masks outside and none inside."""
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
    """Of a tangent that is a view the same view of a masked tangent, on which torch insists; of others `masked`.

    given  the plain tangents that a jvp got, of the masked `tangents`
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
    """Gradients of tensors with these masks; of a plain one plain, unless they are COO, as torch's own sparse ones."""
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
    """torch.Tensor.register_hook. The hook gets a masked gradient, and what it returns is masked as the tensor is."""
    noted = None if tensor.is_leaf else Mask.of(tensor)

    @functools.wraps(hook)
    def hooked(gradient: Tensor) -> Tensor | None:
        mask = noted
        if mask is None:
            leaf = leaf_accumulated_into()  # under the mask that it has now
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
    """The gradient, under the mask of the tensor: also what a hook of a module, or a caller, has put in its place."""
    gradient: Tensor | None = _stored.__get__(tensor)
    if gradient is None or isinstance(gradient, MaskedTensor) or not plain_eager():
        return gradient
    with torch.set_grad_enabled(gradient.requires_grad):
        masked = Mask.of(tensor).on(gradient)
    _stored.__set__(tensor, masked)
    return masked


def install() -> None:
    """Called once, when the package is imported."""
    call_functions_by(_called, _is_given_masked)
    functools.update_wrapper(_register_hook, torch.Tensor.register_hook)
    MaskedTensor.register_hook = never_compiled(_register_hook)  # type: ignore[method-assign, assignment]
    MaskedTensor.grad = property(_grad, _stored.__set__, _stored.__delete__)  # type: ignore[assignment]
