"""In-place, out= and _foreach_ forms: run the functional form, then assign its result to a masked target or update a
plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from masked_dispatch.autograd.engine import accumulate_into, reached_part
from masked_dispatch.dispatch.assign import (
    assign_below,
    before_copy,
    change_metadata_below,
    say_what_is_carried_on,
    say_what_is_dropped,
    stores_a_mask,
    update,
)
from masked_dispatch.dispatch.kernel_table import Kernel
from masked_dispatch.dispatch.overlap import (
    OverlapCheck,
    check_outputs_on_meta,
    data_of,
    refuse_overlapping_outputs,
    shares_memory,
)
from masked_dispatch.dispatch.run_rule import has_masked
from masked_dispatch.engine_internals import called_by_engine, current_node, engine_run
from masked_dispatch.interop.crossing import without_extent
from masked_dispatch.policies import already_asked
from masked_dispatch.scopes import overlays_of_caller, remember_overlays
from masked_dispatch.tensor.assignment import one_of_each
from masked_dispatch.tensor.checks import refuse_meta
from masked_dispatch.tensor.mask_sharing import check_write, computing_in_place
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.memory import exchange, lock_of
from masked_dispatch.tensor.messages import leaves_out_positions, with_copied_mask
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    DispatchKeySet,
    copy_unrecorded,
    keyset_for_write,
    redispatch,
    schema_of,
    tracks_writes,
    under_transform,
    without_pre_dispatch,
)
from op_registry import MaskedSemanticsError
from op_registry.bound import argument
from op_registry.laws.categories import ASSIGNMENT, ELEMENTWISE
from op_registry.records.arguments import can_cast
from op_registry.records.layout import new_buffer
from op_registry.records.tracing import being_traced
from op_registry.rule import Category
from op_registry.schema import single_form

aten = torch.ops.aten


def inplace_kernel(op: OpOverload, compute: Callable[..., Any], category: Category | None = None) -> Kernel:
    """Runs `compute`, the functional form; assigns its result to a masked self, or updates a plain one.

    category  the category of the functional form's rule
    """
    adds, assigns = op is aten.add_.Tensor, op is aten.copy_.default
    write, overlap = write_function(op), OverlapCheck(op, category is ELEMENTWISE)
    on_plain = update_function(op, compute, category, overlap)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        target = args[0]
        if assigns:
            args = (target, source_of_copy(target, args[1]), *args[2:])
            if not has_masked(args):
                return redispatch(op, keyset, args, kwargs)
        if not isinstance(target, MaskedTensor):
            return on_plain(args, kwargs)
        check_writable(op, target)
        if assigns:
            before_copy(target)
        if target.device.type != "meta":
            refuse_meta(op, target, args)
        if adds and engine_run() >= 0 and called_by_engine(1):
            total = accumulate_into(target, args[1])
            if total is not None:
                aten.copy_.default.redispatch(without_pre_dispatch(keyset), target, total)
                return target
        if overlap.active:
            overlap(target, args)
        with overlays_of_caller(1), lock_of(target):
            copied = assigns and args[1] is target  # like torch, this ignores elements that share memory
            result = target if copied else compute_inplace(compute, target, args, kwargs)
            check_fits(op, target, result)
            if assigns:
                say_what_is_dropped(op, [(target, args[1])])
            if under_transform():
                assign_below(target, result)
                return target
            # torch's own copy_ on the wrapper does the leaf and view checks, the version counter and CopySlices.
            write(keyset, target, result)
        remember_overlays(target)
        return target

    return kernel


def update_function(
    op: OpOverload, compute: Callable[..., Any], category: Category | None, overlap: OverlapCheck
) -> Callable[[tuple[Any, ...], dict[str, Any]], Tensor]:
    """What the kernel of an in-place operator calls, with its arguments, if self is plain: it updates self."""
    assigns, drops = op is aten.copy_.default, category is ASSIGNMENT

    def update_self(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        target = args[0]
        if assigns and isinstance(args[1], SparseMaskedTensor) and args[1].shape == target.shape:
            say_what_is_dropped(op, [(target, args[1])])
            return update(target, args[1])
        if drops:
            if assigns:
                say_what_is_carried_on(op, target, args[1])
            # nothing is padded in a plain tensor: what a source lacks is skipped, as what it misses is
            args = (target, *map(without_extent, args[1:]))
            kwargs = {name: without_extent(value) for name, value in kwargs.items()}
        if overlap.active:
            overlap(target, args)
        with overlays_of_caller(2), lock_of(target):
            result = compute(*args, **kwargs)
            check_fits(op, target, result)
            if drops and not argument(op, "accumulate", args, kwargs):
                say_what_is_dropped(op, [(target, result)])
            return update(target, result)

    return update_self


def source_of_copy(target: Tensor, source: Any) -> Tensor:
    """What the kernel of `copy_` writes: a number as a tensor; for the engine, a gradient for memory of that kind."""
    if not isinstance(source, Tensor):  # x.copy_(1.0)
        source = torch.full((), source, device=target.device)
    if engine_run() >= 0 and called_by_engine(2):
        return as_gradient_for(target, reached_part(source))
    return source


def as_gradient_for(target: Tensor, source: Tensor) -> Tensor:
    """Convert a gradient before a write to memory of the other kind, as by DistributedDataParallel's reducer.

    Plain memory, such as the reducer's buckets, holds 0 for invalid elements. When the reducer copies a bucket back
    into a masked parameter's gradient, after the last node, the result keeps that gradient's mask.
    """
    if not isinstance(target, MaskedTensor):
        return source.to_tensor(0) if isinstance(source, MaskedTensor) else source
    if type(target) is MaskedTensor and not isinstance(source, MaskedTensor) and current_node() is None:
        return wrap(source, target._validity)
    return source


# torch neither records these operators nor refuses them for a leaf that requires grad.
UNRECORDED = (
    aten.logical_and_.default,
    aten.logical_or_.default,
    aten.logical_xor_.default,
    aten.logical_not_.default,
)


def write_function(op: OpOverload) -> Callable[[DispatchKeySet, Tensor, Tensor], object]:
    """A function that writes a result to the target of an in-place operator by torch's own copy_, with its keyset."""
    if op in UNRECORDED:
        return copy_unrecorded
    copy = aten.copy_.default.redispatch
    if tracks_writes(op):
        return lambda keyset, target, result: copy(without_pre_dispatch(keyset), target, result)
    return lambda keyset, target, result: copy(keyset_for_write(keyset, target), target, result)


def filling_kernel(op: OpOverload, compute: Callable[..., Any]) -> Kernel:
    """fill_ with a number and zero_: torch allows them on an expanded tensor, and writes each memory location once."""
    general = inplace_kernel(op, compute)

    def kernel(keyset: DispatchKeySet, target: Tensor, *args: Any) -> Tensor:
        # Do not compare symbolic strides, which would add a guard.
        general(keyset, one_of_each(target, target.stride() if type(target) is MaskedTensor else ()), *args)
        return target

    return kernel


def compute_inplace(
    compute: Callable[..., Any], target: MaskedTensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The functional form's result; computing it does not mark the target's validity as shared."""
    operands = (*args, *kwargs.values())
    if torch.is_grad_enabled() and (
        under_transform() or any(isinstance(a, Tensor) and a.requires_grad for a in operands)
    ):
        # Backward needs the old value of the target, so compute on a copy (torch's in-place forms save
        # `original_self` likewise).
        return compute(aten.clone.default(target), *args[1:], **kwargs)
    if target._family is None:
        return compute(*args, **kwargs)
    with computing_in_place(target):
        return compute(*args, **kwargs)


def check_fits(op: OpOverload, target: Tensor, result: Tensor) -> None:
    """Refuse a change of shape or an illegal cast, with torch's own error texts."""
    if result.shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(result.shape)} (in {op})"
        )
    if not can_cast(result.dtype, target.dtype) and op is not aten.copy_.default:
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype} (in {op})"
        )


def check_writable(op: OpOverload, target: MaskedTensor) -> None:
    """Refuse writes through a tensor that is not really a view: they would not reach the base or its mask."""
    if target._stands_for_a_view:
        raise MaskedSemanticsError(
            f"{op} would write through a view (shape {tuple(target.shape)}) of a sparsely stored tensor; the view is a "
            "copy, and the tensor would not change. Assign to the tensor itself, x[index] = value "
            "(x[index] = x[index] + 1 for x[index] += 1), or write to x.to_dense()."
        )
    if target._mask_is_a_copy:
        reason = "several of its elements share one element of the base. Write to the base, or to a clone."
        if leaves_out_positions(target):
            reason = (
                "it is not a part of its base's. Assign to the tensor itself, x[:, a:-b] = value (x[index] = x[index] "
                "+ 1 for x[index] += 1), or write to a clone."
            )
        raise MaskedSemanticsError(f"{op} would write through {with_copied_mask(target)}: {reason}")
    check_write(target)


def out_kernel(op: OpOverload, compute: Callable[..., Any], names: tuple[str, ...], exact: bool = False) -> Kernel:
    """Runs `compute`, the functional form, and writes its results to the out= tensors; `exact`: without a cast."""

    schema = schema_of(op)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        targets = [kwargs.pop(name) for name in names]
        if len(targets) > 1:
            refuse_overlapping_outputs(op, targets)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*targets, *args) if isinstance(t, Tensor)):
            raise RuntimeError(
                f"{schema.name.removeprefix('aten::')}(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad."
            )
        outputs = dict(zip(names, targets, strict=True))
        pairs = _pairs(targets, compute(*args, **kwargs))
        for target, result in pairs:
            if target.shape != result.shape and target.numel() == 0:
                check_gets_values(op, target, result)
        say_what_is_dropped(op, pairs)
        for target, result in pairs:
            if target.shape != result.shape and target.numel() == 0:
                resize_empty(target, result.shape)
            if exact and target.dtype is not result.dtype:
                raise RuntimeError(f"{op} expects an out= of {result.dtype}, got {target.dtype}")
            # In a graph, memory has no address; torch itself refuses these calls only in eager mode.
            in_memory = not being_traced(data_of(target))
            if in_memory and (target.dtype is not result.dtype or shares_memory(target, args)):
                check_outputs_on_meta(op, args, kwargs, outputs)
            check_fits(op, target, result)
            with already_asked():
                target.copy_(result)
        if not schema.returns:
            return None
        return targets[0] if len(names) == 1 else tuple(targets)

    return kernel


def factory_out_kernel(op: OpOverload) -> Kernel:
    """zeros(…, out=x), arange(…, out=x): these write all of x, and make it valid."""

    def kernel(keyset: DispatchKeySet, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if not isinstance(out, MaskedTensor):
            return redispatch(op, keyset, args, {**kwargs, "out": out})
        made = op(*args, **kwargs, out=torch.empty(0, dtype=out.dtype, device=out.device))
        if out.shape != made.shape and out.numel() == 0:
            resize_empty(out, made.shape)
        check_fits(op, out, made)
        return out.copy_(made)

    return kernel


def _pairs(targets: list[Any], results: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each target with its result. A sequence of results belongs to one list of targets, or to all targets."""
    flat_targets = targets[0] if len(targets) == 1 and isinstance(targets[0], (list, tuple)) else targets
    flat_results = [results] if isinstance(results, Tensor) else results
    if len(flat_targets) != len(flat_results):
        raise RuntimeError(f"out= has {len(flat_targets)} tensors for {len(flat_results)} results")
    return list(zip(flat_targets, flat_results, strict=True))


def check_gets_values(op: OpOverload, target: Tensor, result: Tensor) -> None:
    """Refuse to resize a plain out= for a partly invalid result: new memory has no values to keep."""
    if isinstance(target, MaskedTensor) or not isinstance(result, MaskedTensor) or is_wholly_valid(result):
        return
    raise MaskedSemanticsError(
        f"{op}: out= is a plain tensor of shape {tuple(target.shape)}, which would be resized to "
        f"{tuple(result.shape)}. A plain tensor keeps its values where the result is invalid, and new memory has "
        "none. Pass a plain out= of the result's shape, whose values are kept there; a masked one, "
        "masked_tensor(torch.empty(0)); or use the returned result."
    )


def is_wholly_valid(x: MaskedTensor) -> bool:
    """Whether no element is invalid; in a graph, and on meta, whether `x` stores no mask."""
    if not stores_a_mask(x):
        return True
    return not x.is_meta and not being_traced(data_of(x)) and int(x.count()) == x.numel()


def resize_empty(target: Tensor, shape: torch.Size) -> None:
    """Resize a tensor without elements, such as an empty out=; refuse to resize others."""
    if isinstance(target, SparseMaskedTensor):
        raise MaskedSemanticsError(
            f"out= of shape {tuple(target.shape)} is stored as {target.storage_layout} and cannot be resized to "
            f"{tuple(shape)}; pass a tensor of that shape, or use the returned result"
        )
    if isinstance(target, MaskedTensor):
        if being_traced(target._data):
            change_metadata_below(aten.resize_.default, (target, shape), {})
        else:
            exchange(target, new_buffer(target._data.new_empty(shape), valid=False))
    else:
        target.resize_(shape)


def resizing_kernel(op: OpOverload, refusal: Kernel) -> Kernel:
    """resize_ and resize_as_: a tensor without elements gets memory without valid elements; `refusal` serves others."""

    def kernel(keyset: DispatchKeySet, target: Tensor, size: Any, **kwargs: Any) -> Any:
        shape = size.shape if isinstance(size, Tensor) else torch.Size(size)
        if not isinstance(target, MaskedTensor):  # a masked template gives only its size
            return target.resize_(shape, **kwargs)
        if type(target) is not MaskedTensor or target.numel() or kwargs.get("memory_format") is not None:
            return refusal(keyset, target, size, **kwargs)
        if target.requires_grad:
            raise RuntimeError("cannot resize variables that require grad")
        if target.shape != shape:
            resize_empty(target, shape)
        return target

    return kernel


# ---------------------------------------------------------------------------------------------------------------- lists


def foreach_kernel(op: OpOverload) -> Kernel:
    """The single-tensor form on each element, in lists that may mix plain and masked tensors."""
    single = single_form(op)
    assert single is not None
    schema = schema_of(op)
    name = schema.name.partition("::_foreach_")[2].removesuffix("_")
    copies = schema.name == "aten::_foreach_copy_"
    names = [a.name for a in schema.arguments]
    lists = {a.name for a in schema.arguments if str(a.type).startswith("List[") or a.name == "scalars"}
    first_list = next(name for name in names if name in lists)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(arguments.get("scalars"), Tensor):
            arguments["scalars"] = arguments["scalars"].tolist()  # one number for each element, as in torch
        elements = [
            {k: v[i] if k in lists else v for k, v in arguments.items()} for i in range(len(arguments[first_list]))
        ]
        if copies:  # check all targets before writing to the first
            say_what_is_dropped(op, [(element["self"], element["src"]) for element in elements])
        with already_asked() if copies else contextlib.nullcontext():
            results = [_call_single(single, name, element) for element in elements]
        return None if schema.is_mutable else results

    return kernel


def _call_single(single: OpOverloadPacket, name: str, arguments: dict[str, Any]) -> Any:
    """Call with the single form's argument names: addcmul's scalars become value=, the others are positional."""
    positional = dict(arguments)
    keywords = {}
    if name in ("addcmul", "addcdiv"):
        for key in ("value", "scalars"):
            if key in positional:
                keywords["value"] = positional.pop(key)
    if name in ("add", "sub") and "alpha" in positional:
        keywords["alpha"] = positional.pop("alpha")
    return single(*positional.values(), **keywords)
