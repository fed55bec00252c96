"""In-place and out= forms, written back: assigned where the target is masked, an update where it is plain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.autograd.engine import accumulate_into
from masked_dispatch.dispatch.overlays import overlays_of_caller, remember_overlays
from masked_dispatch.dispatch.run_rule import Kernel, has_masked
from masked_dispatch.dispatch.sparse_writes import store, update_elements
from masked_dispatch.tensor.mask_sharing import shared_validity, write_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import (
    DispatchKeySet,
    called_by_engine,
    engine_run,
    metadata_only,
    redispatch,
    tracking_views_and_versions,
    under_transform,
    without_pre_dispatch,
)
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense, fill_where_invalid
from op_registry.sparse.permuted import to_dense

aten = torch.ops.aten


def inplace_kernel(op: OpOverload, compute: Callable[..., Any]) -> Kernel:
    """`compute` is the functional form; its result is assigned to a masked self and updates a plain one."""
    adds, assigns = op is aten.add_.Tensor, op is aten.copy_.default

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        target = args[0]
        if isinstance(target, MaskedTensor):
            check_writable(op, target)
            if adds and engine_run() >= 0 and called_by_engine(1):
                total = accumulate_into(target, args[1])
                if total is not None:
                    aten.copy_.default.redispatch(without_pre_dispatch(keyset), target, total)
                    return target
        elif assigns and isinstance(args[1], SparseMaskedTensor) and args[1].shape == target.shape:
            return update(target, args[1])
        with overlays_of_caller(1):
            result = compute_inplace(compute, target, args, kwargs)
        check_fits(op, target, result)
        if not isinstance(target, MaskedTensor):
            return update(target, result)
        if under_transform():
            assign_below(target, result)
            return target
        # torch's own copy_ on the wrapper: leaf and view checks, version counter and CopySlices are torch's own.
        aten.copy_.default.redispatch(without_pre_dispatch(keyset), target, result)
        remember_overlays(target)
        return target

    return kernel


def compute_inplace(compute: Callable[..., Any], target: Tensor, args: Any, kwargs: Any) -> Any:
    """The functional form's result. That it has read the target's validity gives nobody a share in it."""
    if not isinstance(target, MaskedTensor):
        return compute(*args, **kwargs)
    operands = (*args, *kwargs.values())
    if torch.is_grad_enabled() and (
        under_transform() or any(isinstance(a, Tensor) and a.requires_grad for a in operands)
    ):
        # What is saved for backward is the target as it was, a copy: torch's in-place forms save `original_self` too.
        return compute(aten.clone.default(target), *args[1:], **kwargs)
    family = target._family
    if family is None:
        return compute(*args, **kwargs)
    lent = family.lent
    result = compute(*args, **kwargs)
    family.lent = lent
    return result


def check_fits(op: OpOverload, target: Tensor, result: Tensor) -> None:
    """An in-place form must keep shape and dtype; torch's own words where it does not."""
    if result.shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(result.shape)} (in {op})"
        )
    if not torch.can_cast(result.dtype, target.dtype) and op is not aten.copy_.default:
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype} (in {op})"
        )


def check_writable(op: OpOverload, target: MaskedTensor) -> None:
    """A view of another dtype holds a copy of its base's mask, which a write would not reach."""
    if target._stands_for_a_view:
        raise MaskedSemanticsError(
            f"{op} would write through a view (shape {tuple(target.shape)}) of a tensor that was stored sparsely; the "
            "view has storage of its own, and the write would not show. Assign to the tensor itself, x[index] = value "
            "(x[index] = x[index] + 1 for x[index] += 1), or write to x.to_dense()."
        )
    if target._mask_is_a_copy:
        raise MaskedSemanticsError(
            f"{op} would write through a view of another dtype ({target.dtype}, shape {tuple(target.shape)}), whose "
            "mask is a copy: several of its elements share one element of the base. Write to the base, or to a clone."
        )


def update(target: Tensor, result: Tensor) -> Tensor:
    """A plain tensor takes the valid values of `result` and keeps its own elsewhere."""
    if isinstance(result, SparseMaskedTensor):
        return update_elements(target, result)
    if isinstance(result, MaskedTensor):
        record = unwrap(result)
        result = record.data
        if record.validity is not None:
            result = fill_where_invalid(result.to(target.dtype), record.validity, target)
    return target.copy_(result)


def assign_below(target: MaskedTensor, source: Tensor) -> None:
    """Write values and validity, below autograd."""
    if isinstance(target, SparseMaskedTensor):
        store(target, source)
        return
    if isinstance(source, SparseMaskedTensor):
        dense = to_dense(source.record)
        source = wrap(dense.data, dense.validity)
    if isinstance(source, MaskedTensor):
        target._data.copy_(source._data)
        write_validity(target, shared_validity(source))
    else:
        target._data.copy_(source)
        write_validity(target, None)


def out_kernel(op: OpOverload, compute: Callable[..., Any], names: tuple[str, ...], exact: bool = False) -> Kernel:
    """`compute` is the functional form; its results are written to what is given as out=, `exact` without a cast."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not has_masked(args) and not has_masked(kwargs.values()):
            return redispatch(op, keyset, args, kwargs)
        targets = [kwargs.pop(name) for name in names]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*targets, *args) if isinstance(t, Tensor)):
            raise RuntimeError(
                f"{op._schema.name.removeprefix('aten::')}(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad."
            )
        given = dict(zip(names, targets, strict=True))
        for target, result in _pairs(targets, compute(*args, **kwargs)):
            if target.shape != result.shape and target.numel() == 0:
                make_room(target, result.shape)
            if exact and target.dtype is not result.dtype:
                raise RuntimeError(f"{op} expects an out= of {result.dtype}, got {target.dtype}")
            if target.dtype is not result.dtype or shares_memory(target, args):
                rehearse(op, args, kwargs, given)
            check_fits(op, target, result)
            target.copy_(result)
        if not op._schema.returns:
            return None
        return targets[0] if len(names) == 1 else tuple(targets)

    return kernel


def _pairs(targets: list[Any], results: Any) -> list[tuple[Tensor, Tensor]]:
    """What is to be written, with what it is written to; a list of results is one of the targets, or all of them."""
    flat = targets[0] if len(targets) == 1 and isinstance(targets[0], (list, tuple)) else targets
    given = [results] if isinstance(results, Tensor) else results
    if len(flat) != len(given):
        raise RuntimeError(f"out= has {len(flat)} tensors for {len(given)} results")
    return list(zip(flat, given, strict=True))


def make_room(target: Tensor, shape: torch.Size) -> None:
    """Resize an empty tensor that all of a result is about to be written to, which people may not do by themselves."""
    if isinstance(target, SparseMaskedTensor):
        raise MaskedSemanticsError(
            f"out= of shape {tuple(target.shape)} is stored as {target.storage_layout} and cannot be resized to "
            f"{tuple(shape)}; hand in a tensor of that shape, or take the result"
        )
    if isinstance(target, MaskedTensor):
        change_metadata_below(aten.resize_.default, (target, shape), {})
    else:
        target.resize_(shape)


def rehearse(op: OpOverload, args: Any, kwargs: dict[str, Any], targets: dict[str, Tensor]) -> None:
    """The same call without values, for torch to say itself whether it takes outputs of these dtypes and memory."""
    storages: dict[int, torch.UntypedStorage] = {}

    def without_values(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [without_values(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, SparseMaskedTensor):  # memory that nothing else of a dense call lies in
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        data = value._data if isinstance(value, MaskedTensor) else value.detach()
        storage = data.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes(), device="meta")
        empty = torch.empty(0, dtype=data.dtype, device="meta")
        return empty.set_(storages[storage.data_ptr()], data.storage_offset(), data.shape, data.stride())  # type: ignore[call-overload]

    outputs = {name: without_values(target) for name, target in targets.items()}
    # What cannot be run without values has nothing to say.
    with contextlib.suppress(NotImplementedError):
        op(*[without_values(a) for a in args], **{k: without_values(v) for k, v in kwargs.items()}, **outputs)


def shares_memory(target: Tensor, args: Any) -> bool:
    """Whether an argument lies in the same storage as `target`."""

    def storage(tensor: Tensor) -> int:
        if isinstance(tensor, SparseMaskedTensor):
            return tensor._kept_values.untyped_storage().data_ptr()
        data = tensor._data if isinstance(tensor, MaskedTensor) else tensor
        return data.untyped_storage().data_ptr()

    inputs = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
    return any(storage(t) == storage(target) for t in inputs)


def metadata_kernel(op: OpOverload) -> Kernel:
    """In-place forms that change shape or strides only (transpose_, squeeze_ …): autograd's part is torch's own."""

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = redispatch(op, keyset, args, kwargs)
        remember_overlays(args[0])
        return result

    return kernel


def change_metadata_below(op: OpOverload, args: Any, kwargs: Any) -> MaskedTensor:
    """transpose_ and its like, applied to the data, the expanded validity and the wrapper."""
    tensor: MaskedTensor = args[0]
    view = getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_"))
    validity = Dense(tensor._data, tensor._validity).full_validity
    with tracking_views_and_versions():
        tensor._data = view(tensor._data, *args[1:], **kwargs)
        tensor._stored = None if validity is None else view(validity, *args[1:], **kwargs)
    tensor._cut_from = None
    with metadata_only():
        op(*args, **kwargs)
    return tensor
