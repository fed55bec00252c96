"""Views of masked tensors: torch makes its own view node on the wrapper; below autograd we view data and mask alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import Node

from masked_dispatch.autograd.dense import checked_validity, data_under, masked_gradient, unwrap
from masked_dispatch.autograd.reached import carry, moved_back_by_view, what_views_reached
from masked_dispatch.compiler_internals import never_compiled
from masked_dispatch.dispatch.kernel_table import Kernel
from masked_dispatch.dispatch.run_rule import lowered
from masked_dispatch.engine_internals import called_by_functorch
from masked_dispatch.scopes import remember_overlays
from masked_dispatch.tensor.extents import know_extent
from masked_dispatch.tensor.in_transform import InTransform, wrap_in_transform
from masked_dispatch.tensor.mask_sharing import copy_validity_before_views, family_of, make_view_family, shared_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, inference_mode_of, with_extent, wrap
from masked_dispatch.tensor.messages import extent_not_carried, returned_to_torch_func
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    DispatchKeySet,
    redispatch,
    share_storage,
    tracking_views_and_versions,
    transform_level,
    under_transform,
)
from op_registry import MaskedSemanticsError
from op_registry.extents.remembered import PartOfEach
from op_registry.extents.run import run_with_extents
from op_registry.extents.writes import extent_in, region_of
from op_registry.records.dense import Dense
from op_registry.records.fill import hand_on, known_tensors, known_zero, remember_zero
from op_registry.records.tracing import being_traced
from op_registry.rule import Rule, Run

aten = torch.ops.aten


def view_kernel(op: OpOverload, rule: Rule) -> Kernel:
    """Uses torch's own view node: `_base`, version counters and in-place writes in autograd then work as in torch."""
    run = rule.bind(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        base = args[0]
        if not isinstance(base, MaskedTensor):
            return redispatch(op, keyset, args, kwargs)
        if isinstance(base, SparseMaskedTensor):
            return view_of_sparse(op, args, kwargs)
        if transform_level() is not None:
            if called_by_functorch(1):
                raise MaskedSemanticsError(returned_to_torch_func(base))  # vmap expands outputs it does not know
            record = unwrap(base)
            if isinstance(base, InTransform):
                copy_validity_before_views(base)
                record = Dense(base._data, base._validity, base._extent)
            try:
                views = _viewed(run, rule, op, record, args, kwargs)
            except RuntimeError as error:
                if not str(error).startswith("Batching rule not implemented"):
                    raise
                raise MaskedSemanticsError(
                    f"vmap of torch {torch.__version__} cannot map over this view ({str(error).partition(';')[0]}). "
                    "View the whole batch, before or after vmap, or use a newer torch that has the rule."
                ) from error
            return _wrap_views(base, views, wrap_in_transform)
        view = redispatch(op, keyset, args, kwargs)
        first = view[0] if isinstance(view, (list, tuple)) and view else view
        if isinstance(first, Tensor) and first.requires_grad and first.grad_fn is not None:
            views = view if isinstance(view, (list, tuple)) else [view]
            differentiate_on_plain(first.grad_fn, shared_validity(base), views)
        return view

    return kernel


def metadata_kernel(op: OpOverload) -> Kernel:
    """In-place forms that only change shape or strides (transpose_, squeeze_ …); autograd handles them as in torch."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0]
        recorded = not under_transform() and tensor.requires_grad and torch.is_grad_enabled() and tensor._base is None
        recorded = recorded and not isinstance(tensor, SparseMaskedTensor)
        before = shared_validity(tensor) if recorded else None
        result = redispatch(op, keyset, args, kwargs)
        if recorded:
            differentiate_on_plain(tensor.grad_fn, before, [tensor])
        remember_overlays(tensor)
        return result

    return kernel


def view_of_sparse(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A copy in place of a view, marked as not writable: a sparsity pattern has no views."""
    result = lowered(op, args, kwargs)
    for tensor in result if isinstance(result, (list, tuple)) else [result]:
        if tensor is not args[0]:  # a view of the whole tensor returns the tensor itself
            tensor._stands_for_a_view = True
            if op is aten.view_as_real.default:
                tensor._real_view_of = args[0]
    return result


def differentiate_on_plain(node: Node, of_base: Tensor | None, views: Sequence[MaskedTensor]) -> None:
    """Let the node of `views` of a base with this validity run its formula on plain gradients."""
    gradients = PlainGradients(of_base, [shared_validity(view) for view in views])
    node.register_prehook(gradients.to_plain)
    node.register_hook(gradients.to_masked)


class PlainGradients:
    """Passes the data of the views' gradients to a view's formula, and masks the formula's result like the base.

    The base's mask hides the same elements as the view's mask. So a gradient under the view's own mask needs no fill,
    and if it is zero where invalid, so is the formula's result.
    """

    __slots__ = ("of_base", "of_views", "reached")

    def __init__(self, of_base: Tensor | None, of_views: Sequence[Tensor | None]) -> None:
        self.of_base, self.of_views = of_base, of_views
        self.reached: Sequence[Tensor | None] = ()

    @never_compiled
    def to_plain(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        self.reached = what_views_reached(gradients, self.of_views)
        return tuple(None if g is None else data_under(g, v) for g, v in zip(gradients, self.of_views, strict=True))

    @never_compiled
    def to_masked(self, gradients: Sequence[Tensor | None], of_views: Sequence[Tensor | None]) -> Any:
        validity = self.of_base
        if validity is not None and all(
            g is None or known_zero(g, v) for g, v in zip(of_views, self.of_views, strict=True)
        ):
            for g in gradients:
                if g is not None:
                    remember_zero(g, validity)
        reached, self.reached = self.reached, ()
        if not reached:
            return tuple(None if g is None else masked_gradient(g, validity) for g in gradients)
        (grad,) = gradients
        return (None if grad is None else carry(masked_gradient(grad, validity), moved_back_by_view(reached)),)


class _ThreadState(threading.local):
    """Whether this thread makes the view that a graph returned."""

    from_graph = False


_this_thread = _ThreadState()


def view_from_graph(base: MaskedTensor, returned: MaskedTensor) -> MaskedTensor:
    """The view of a graph's argument in place of what the graph returned."""
    _this_thread.from_graph = True
    try:
        return base.as_strided(returned.size(), returned.stride(), returned.storage_offset())  # type: ignore[return-value]
    finally:
        _this_thread.from_graph = False


def like_returned(view: MaskedTensor, returned: MaskedTensor) -> MaskedTensor:
    """The view, conjugated or negated where what the graph returned is: a view by strides shows memory as it lies."""
    if not isinstance(view, MaskedTensor) or isinstance(view, SparseMaskedTensor):
        return view
    shown: Any = view.conj() if view._data.is_conj() != returned._data.is_conj() else view
    shown = aten._neg_view.default(shown) if shown._data.is_neg() != returned._data.is_neg() else shown
    return shown  # type: ignore[no-any-return]


def known_from_graph(view: MaskedTensor, returned: MaskedTensor) -> MaskedTensor:
    """The view as the graph returned it: with its extent, and its mask if that is no part of its base's."""
    view = like_returned(view, returned)
    if returned._mask_is_a_copy:
        view._family, view._stored_validity, view._mask_is_a_copy = None, returned._validity, True
    return with_extent(view, returned._extent)


def strided_view_below(base: MaskedTensor, *args: Any, **kwargs: Any) -> MaskedTensor:
    """as_strided addresses memory, so the family's validity must have memory with the data's strides."""
    with inference_mode_of(base), tracking_views_and_versions():
        view = wrap(base._data.as_strided(*args, **kwargs), None)
        if base._extent is not None and not _this_thread.from_graph:
            region = region_of(base._data, view._data)
            if region is None:
                raise MaskedSemanticsError(extent_not_carried(base, "as_strided with other dimensions than its own"))
            view._extent = extent_in(base._extent, region)
        share_storage(view, base)
        make_view_family(base, view, addressed=base._validity is not None)
    return view


def view_below(run: Run, rule: Rule | None, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The view of data and validity, in one family with its base."""
    base = args[0]
    traced = being_traced(base._data)
    if traced:
        copy_validity_before_views(base)
    elif torch.is_inference_mode_enabled() and not base.is_inference():
        with inference_mode_of(base):
            return view_below(run, rule, op, args, kwargs)
    record = Dense(base._data, base._validity, base._extent)
    with contextlib.nullcontext() if traced else tracking_views_and_versions():
        return _wrap_views(base, _viewed(run, rule, op, record, args, kwargs))


def _viewed(
    run: Run, rule: Rule | None, op: OpOverload, record: Dense, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if record.extent is None:
        return run(record, *args[1:], **kwargs)
    assert rule is not None
    return run_with_extents(run, rule, op, record, *args[1:], **kwargs)


def _wrap_views(
    base: MaskedTensor, result: Dense | list[Dense] | tuple[Dense, ...], wrap: Callable[..., MaskedTensor] = wrap
) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_wrap_views(base, r, wrap) for r in result)
    view = wrap(result.data, checked_validity(result))
    if id(base._data) in known_tensors:
        hand_on(base._data, view._data, view._stored_validity, of_source=base._validity)
    if not base._data.is_conj() or result.data.dtype is base.dtype:
        share_storage(view, base)  # (the real view of conjugated data is a copy)
    if result.extent is not None:
        with_extent(view, result.extent)
    is_copy = result.data.dtype is not base.dtype or isinstance(result, PartOfEach)
    if not is_copy:
        view._family = family = base._family or family_of(base)
        if family.extent_written:
            know_extent(view, result.extent)
    view._stands_for_a_view = base._stands_for_a_view
    view._mask_is_a_copy = base._mask_is_a_copy or is_copy
    return view
