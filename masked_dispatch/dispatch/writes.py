"""In-place and out= forms: run the functional form, then assign its result to a masked target or update a plain one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.autograd.engine import accumulate_into, reached_part
from masked_dispatch.dispatch.extents import (
    before_copy,
    extent_after,
    receive_extent,
    say_what_is_carried_on,
    say_what_is_not_there,
    where_there,
)
from masked_dispatch.dispatch.overlap import OverlapCheck, refuse_overlapping_outputs
from masked_dispatch.dispatch.overlays import overlays_of_caller, remember_overlays
from masked_dispatch.dispatch.run_rule import Kernel, has_masked
from masked_dispatch.dispatch.sparse_writes import record_below, store, update_elements
from masked_dispatch.engine_internals import called_by_engine, current_node, engine_run
from masked_dispatch.interop.crossing import without_extent
from masked_dispatch.tensor.buffers import exchange
from masked_dispatch.tensor.checks import refuse_meta
from masked_dispatch.tensor.mask_sharing import check_write, computing_in_place, shared_validity, write_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.messages import leaves_out_positions, with_copied_mask
from masked_dispatch.tensor.shared_places import may_share, one_of_each
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.tensor.write_locks import lock_of
from masked_dispatch.torch_internals import (
    DispatchKeySet,
    copy_unrecorded,
    keyset_for_write,
    redispatch,
    schema_of,
    share_memory,
    tracking_views_and_versions,
    tracks_writes,
    under_transform,
    without_pre_dispatch,
    without_torch_dispatch,
)
from masked_dispatch.update_policy import already_asked, current, dropped
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import conjunction, factors_of
from op_registry.laws.categories import ASSIGNMENT, ELEMENTWISE, argument
from op_registry.records.dense import Dense
from op_registry.records.dtypes import can_cast
from op_registry.records.fill import fill_where_invalid
from op_registry.records.memory import new_buffer
from op_registry.records.tracing import being_traced
from op_registry.records.validity import intersect
from op_registry.rule import Category
from op_registry.sparse.layout import OF_TORCH
from op_registry.sparse.permuted import to_dense

aten = torch.ops.aten


def inplace_kernel(op: OpOverload, compute: Callable[..., Any], category: Category | None = None) -> Kernel:
    """Runs `compute`, the functional form; assigns its result to a masked self, or updates a plain one.

    category  the category of the functional form's rule
    """
    adds, assigns = op is aten.add_.Tensor, op is aten.copy_.default
    elementwise, drops = category is ELEMENTWISE, category is ASSIGNMENT
    write, overlap = write_function(op), OverlapCheck(op, elementwise)

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        target = args[0]
        if assigns and not isinstance(args[1], Tensor):  # x.copy_(1.0)
            args = (target, torch.full((), args[1], device=target.device), *args[2:])
        if assigns and engine_run() >= 0 and called_by_engine(1):
            args = (target, as_gradient_for(target, reached_part(args[1])), *args[2:])
            if not has_masked(args):
                return redispatch(op, keyset, args, kwargs)
        if isinstance(target, MaskedTensor):
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
        elif assigns and isinstance(args[1], SparseMaskedTensor) and args[1].shape == target.shape:
            say_what_is_dropped(op, [(target, args[1])])
            return update(target, args[1])
        elif drops:
            if assigns:
                say_what_is_carried_on(op, target, args[1])
            # nothing is padded in a plain tensor: what a source lacks is skipped, as what it misses is
            args = (target, *map(without_extent, args[1:]))
            kwargs = {name: without_extent(value) for name, value in kwargs.items()}
        if overlap.active:
            overlap(target, args)
        with overlays_of_caller(1), lock_of(target):
            copied = assigns and args[1] is target  # like torch, this ignores elements that share memory
            result = target if copied else compute_inplace(compute, target, args, kwargs)
            check_fits(op, target, result)
            if not isinstance(target, MaskedTensor):
                if drops and not argument(op, "accumulate", args, kwargs):
                    say_what_is_dropped(op, [(target, result)])
                return update(target, result)
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


def compute_inplace(compute: Callable[..., Any], target: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The functional form's result; computing it does not mark the target's validity as shared."""
    if not isinstance(target, MaskedTensor):
        return compute(*args, **kwargs)
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


def update(target: Tensor, result: Tensor) -> Tensor:
    """Write the valid values of `result` to a plain tensor, which keeps its own values elsewhere."""
    if target.layout in OF_TORCH:
        raise MaskedSemanticsError(
            f"a masked result of shape {tuple(result.shape)} cannot be written to a plain tensor stored as "
            f"{target.layout}, which has no place for elements that it does not specify. Write to target.to_dense(), "
            "or use the form that returns a tensor."
        )
    if isinstance(result, SparseMaskedTensor):
        return update_elements(target, result)
    if isinstance(result, MaskedTensor):
        record = unwrap(result)
        result = record.data
        if record.validity is not None:
            result = fill_where_invalid(result.to(target.dtype), record.validity, target)
    return target.copy_(result)


def assign_below(target: MaskedTensor, source: Tensor) -> None:
    """Write values and validity; called below autograd."""
    if source is target:
        return
    if target._extent is not None and not isinstance(source, MaskedTensor):
        source = wrap(source, conjunction(factors_of(record_below(target))))
    receive_extent(target, source)
    if isinstance(target, SparseMaskedTensor):
        store(target, source)
        return
    if isinstance(source, SparseMaskedTensor):
        dense = to_dense(source.record)
        source = wrap(dense.data, dense.validity)
    source = where_there(target, source)
    if not isinstance(source, MaskedTensor):
        target._data.copy_(source)
        write_validity(target, None)
        return
    old, validity = target._validity, shared_validity(source)
    if validity is None or validity is old or not may_stop_between(target):
        target._data.copy_(source._data)
        write_validity(target, validity)
    elif old is None:
        write_validity(target, validity)  # only takes away
        target._data.copy_(source._data)
    else:
        try:
            target._data.copy_(source._data)
            write_validity(target, validity)
        except BaseException:  # the write may be partial: keep valid only what is valid before and after it
            write_validity(target, intersect(target._validity, validity))
            raise


def may_stop_between(target: MaskedTensor) -> bool:
    """Whether an exception, as from a signal handler, may come between the writes of data and validity.

    If so, the order of writes never makes an invalid element valid. False if torch may refuse to write the data,
    because elements share memory.
    """
    traced = being_traced(target._data) or target._carries_transform
    return not traced and not may_share(target._data)


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


def say_what_is_dropped(op: OpOverload, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Before we assign results to targets: warn or raise, as `updates` says, about the first partly invalid result
    whose target is plain, and about valid elements where a target has no position.

    This counts elements on the CPU; on other devices it would have to wait.
    """
    if current() == "silent":
        return
    for target, result in pairs:
        if not isinstance(result, MaskedTensor) or not stores_a_mask(result):
            continue
        if isinstance(target, MaskedTensor):
            say_what_is_not_there(op, target, result)
            continue
        shapes = f"a masked tensor of shape {tuple(result.shape)} to a plain tensor of shape {tuple(target.shape)}"
        if result.device.type != "cpu" or being_traced(data_of(result)) or under_transform():
            dropped(str(op), f"{shapes} would lose its mask")
            return
        invalid = result.numel() - int(result.count())
        if invalid:
            dropped(str(op), f"{shapes} would skip its invalid elements, {invalid} of {result.numel()}", count=invalid)
            return


def stores_a_mask(x: MaskedTensor) -> bool:
    """Whether the storage of `x` allows invalid elements."""
    return isinstance(x, SparseMaskedTensor) or x._validity is not None


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


def check_outputs_on_meta(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Mapping[str, Tensor]
) -> None:
    """Make the same call on meta tensors: torch itself refuses outputs of wrong dtypes or overlapping memory."""
    # Found by what shares memory: an address is 0 on some devices, and in the memory of some CUDA graphs.
    storages: list[tuple[Tensor, torch.UntypedStorage]] = []

    def on_meta(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [on_meta(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, SparseMaskedTensor):  # it shares memory with no other argument of a dense call
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        data = value._data if isinstance(value, MaskedTensor) else value.detach()
        storage = next((s for t, s in storages if share_memory(t, data)), None)
        if storage is None:
            storage = torch.UntypedStorage(data.untyped_storage().nbytes(), device="meta")
            storages.append((data, storage))
        empty = torch.empty(0, dtype=data.dtype, device="meta")
        return empty.set_(storage, data.storage_offset(), data.shape, data.stride())  # type: ignore[call-overload]

    meta_outputs = {name: on_meta(output) for name, output in outputs.items()}
    # We cannot check an operator without a meta kernel.
    with contextlib.suppress(NotImplementedError):
        op(*[on_meta(a) for a in args], **{k: on_meta(v) for k, v in kwargs.items()}, **meta_outputs)


def shares_memory(target: Tensor, args: Sequence[object]) -> bool:
    """Whether an argument has the same storage as `target`."""
    inputs = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
    return any(share_memory(data_of(t), data_of(target)) for t in inputs)


def data_of(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the values of a tensor, masked or plain."""
    if isinstance(tensor, SparseMaskedTensor):
        return tensor._kept_values
    return tensor._data if isinstance(tensor, MaskedTensor) else tensor


def change_metadata_below(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> MaskedTensor:
    """Apply transpose_ and similar operators to the data, the expanded validity and the wrapper."""
    tensor: MaskedTensor = args[0]
    view = getattr(aten, schema_of(op).name.removeprefix("aten::").removesuffix("_"))
    validity = Dense(tensor._data, tensor._validity).full_validity
    extent = extent_after(op, tensor, args[1:], kwargs)
    with tracking_views_and_versions():
        tensor._data = view(tensor._data, *args[1:], **kwargs)
        tensor._stored_validity = None if validity is None else view(validity, *args[1:], **kwargs)
    tensor._part_of_memory = tensor._part_of_extent = tensor._extent = None
    with_extent(tensor, extent)
    with without_torch_dispatch():  # the wrapper itself
        op(*args, **kwargs)
    return tensor
