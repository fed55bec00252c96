"""What a write leaves in its target: values, validity and extent.

assign_below           a masked target takes all of what is written, in its own memory and layout
update                 a plain target takes the valid values, and keeps its own elsewhere
change_metadata_below  a target takes another shape or other strides
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from masked_dispatch.autograd.dense import unwrap
from masked_dispatch.autograd.sparse import unwrap_sparse
from masked_dispatch.dispatch.overlap import data_of
from masked_dispatch.policies import STATES, TO_PADDED, dropped, updating
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.assignment import may_share
from masked_dispatch.tensor.extents import forget_extent
from masked_dispatch.tensor.mask_sharing import shared_validity, write_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent
from masked_dispatch.tensor.messages import (
    extent_not_carried,
)
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.tensor.storage import Stored
from masked_dispatch.torch_internals import (
    schema_of,
    tracking_views_and_versions,
    under_transform,
    without_torch_dispatch,
)
from op_registry import MaskedSemanticsError, resolve
from op_registry.extents.factors import confined, conjunction, factors_of
from op_registry.extents.follow import is_all_valid
from op_registry.extents.found import in_layout
from op_registry.extents.run import run_with_extents
from op_registry.extents.writes import explicit, same_mask
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.fill import fill_where_invalid
from op_registry.records.tracing import being_traced, may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect
from op_registry.sparse.convert import with_sparse_dims
from op_registry.sparse.coordinates import gather, scatter_
from op_registry.sparse.layout import OF_TORCH
from op_registry.sparse.permuted import AnyRecord, Permuted, in_base_dims, to_dense
from op_registry.sparse.record import Sparse

aten = torch.ops.aten


def assign_below(target: MaskedTensor, source: Tensor) -> None:
    """Give a masked target the values, the validity and the extent of what is written; called below autograd."""
    if source is target:
        return
    written, own = record_below(source), target._extent
    if own is not None and not isinstance(source, MaskedTensor):
        written = Dense(source, conjunction(factors_of(record_below(target))))
    if isinstance(target, SparseMaskedTensor):
        store(target, written)
        return
    dense = written if isinstance(written, Dense) else to_dense(written)
    if own is not None or dense.extent is not None:
        receive_extent(target, dense)
    write_densely(target, dense)


def store(target: SparseMaskedTensor, written: AnyRecord) -> None:
    """Replace what a tensor stores, in its own order of dimensions, sparse dimensions, layout, dtype and memory.

    It has the extent of what is written; without one, it keeps its own.
    """
    if target._is_graph_input:
        raise MaskedSemanticsError(
            f"an in-place operation on a masked tensor of shape {tuple(target.shape)} that is stored as "
            f"{target.storage_layout} and is an argument of a compiled function: a graph cannot replace what its "
            "argument stores. Return the out-of-place result, or work on x.clone()."
        )
    kept, order, received = target._kept, target._order, written.extent
    if received is not None and (received.factors or received.states):
        target._replace_extent(received)
    values, _, pattern = kept.now
    shape = (*pattern.sizes, *values.shape[pattern.lead :])
    if isinstance(written, Permuted) and written.order == order:
        written = written.base
    elif order is not None or isinstance(written, Permuted):
        written = to_dense(written)
        written = written if order is None else written.map(lambda t: in_base_dims(t, order, shape))
    extent = target._extent if order is None else None
    if isinstance(written, Sparse):
        written = with_sparse_dims(written, pattern.ndim)
        written = Sparse(written.values, written.pattern, extent)
    else:
        validity = None if written.validity is None else written.validity.expand(shape)
        written = Dense(written.data.expand(shape), validity, extent)
    stored = in_layout(written, pattern.layout, pattern.ndim, pattern.block)
    if kept.in_place:
        overwrite(target, stored)
    else:
        kept.now = Stored(stored.values.data.to(target.dtype, copy=True), stored.values.full_validity, stored.pattern)


def overwrite(target: SparseMaskedTensor, written: Sparse) -> None:
    """Write values and validity to a tensor in shared memory, which keeps its pattern."""
    kept, pattern = target._kept, target._pattern
    values = written.values
    if not written.pattern.same_as(pattern):
        values = written.at(pattern.coordinates()).map(pattern.fold)
        if _number_valid(values) < _number_valid(written.values):
            raise MaskedSemanticsError(
                f"an in-place operation would store other elements in a masked tensor of shape {tuple(target.shape)} "
                f"that is stored as {target.storage_layout} and lies in shared memory: its indices cannot change "
                "there. Write only to elements that are stored (values may become invalid), write to x.clone(), or "
                "share x.to_dense()."
            )
    kept.write_in_place(values)


def _number_valid(values: Dense) -> int:
    validity = values.full_validity
    return values.data.numel() if validity is None else int(validity.sum(dtype=torch.int64))


def write_densely(target: MaskedTensor, written: Dense) -> None:
    """Write to the memory of a densely stored tensor: an exception in between never makes an invalid element valid."""
    data, validity, family = written.data, written.validity, target._family
    if family is not None and family.extent is not None:
        validity = family.validity_there(target, validity)
    old = target._validity
    if validity is None or validity is old or not may_stop_between(target):
        target._data.copy_(data)
        write_validity(target, validity)
    elif old is None:
        write_validity(target, validity)  # only takes away
        target._data.copy_(data)
    else:
        try:
            target._data.copy_(data)
            write_validity(target, validity)
        except BaseException:  # the write may be partial: keep valid only what is valid before and after it
            write_validity(target, intersect(target._validity, validity))
            raise


def may_stop_between(target: MaskedTensor) -> bool:
    """Whether an exception, as from a signal handler, may come between the writes of data and validity.

    False if torch may refuse to write the data, because elements share memory.
    """
    traced = being_traced(target._data) or target._carries_transform
    return not traced and not may_share(target._data)


def record_below(source: Tensor) -> AnyRecord:
    """The record of a tensor in any layout, as it is stored: without derivatives."""
    if isinstance(source, SparseMaskedTensor):
        return source.record
    if isinstance(source, MaskedTensor):
        return Dense(source._data, shared_validity(source), source._extent)
    return Dense(source, None)


def receive_extent(target: MaskedTensor, written: Dense) -> None:
    """Before a write: the extent of what is written is the target's from now on, and that of all that share its memory.

    The functional form that computed it intersected its extent with the target's own; without one, that stays.
    """
    received, own = written.extent, target._extent
    if _have_the_same(target, own, written):
        return
    if not ((received is not None and received.states) or (received or own).factors):  # type: ignore[union-attr]
        return
    before = Dense(target._data, target._validity, own)
    if target._family is not None and being_traced(target._data):
        target._family.check_receives_own(target, before, written)
        return
    if received is None:
        received = Extent(explicit(factors_of(before)), is_mask=False)
    if target._family is None:
        with_extent(target, received)
    else:
        target._family.receive_extent(target, before, Dense(written.data, written.validity, received))


def _have_the_same(target: MaskedTensor, own: Extent | None, written: AnyRecord) -> bool:
    """Whether a record has a tensor's extent, and its mask where that is the extent: no look at their booleans."""
    if written.extent is not own or own is None or not own.is_mask:
        return written.extent is own
    return same_mask([target._printed_record, written])  # (the record as it is stored)


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


def update_elements(target: Tensor, result: SparseMaskedTensor) -> Tensor:
    """Write the valid values of `result` to a plain tensor at their coordinates, without a temporary of its size."""
    record, original = unwrap_sparse(result), target
    if isinstance(record, Permuted):
        target, record = record.to_base(target), record.base
    flat, coordinates = record.flat, record.pattern.coordinates()
    values = flat.data.to(target.dtype)
    if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)):
        target.copy_(values.new_zeros(()))  # raises torch's error for expanded tensors, whose elements share memory
    valid = flat.full_validity
    if valid is not None:
        values = torch.where(as_bool(valid), values, gather(target, coordinates))
    scatter_(target, coordinates, values)
    return original


def say_what_is_dropped(op: OpOverload, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Before we assign results to targets: warn or raise, as `updates` says, about the first partly invalid result
    whose target is plain, and about valid elements where a target has no position.

    This counts elements on the CPU; on other devices it would have to wait.
    """
    if updating() == "silent":
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


def extent_after(op: OpOverload, tensor: MaskedTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Extent | None:
    """The extent of a tensor whose shape or strides `op` changes in place, with these further arguments."""
    if tensor._extent is None:
        return None
    meaning, record = resolve(op), Dense(tensor._data, tensor._validity, tensor._extent)
    if meaning.rule is None or meaning.base is None:
        raise MaskedSemanticsError(extent_not_carried(tensor, f"{op}, which changes shape or strides in place,"))
    run = meaning.rule.bind(meaning.base)
    changed: Dense = run_with_extents(run, meaning.rule, meaning.base, record, *args, **kwargs)
    return changed.extent


def say_what_is_not_there(op: OpOverload, target: MaskedTensor, source: Tensor) -> None:
    """Warn or raise, as `updates` says, of valid elements of a masked source at positions that the target lacks.

    A source that is valid everywhere is a value for all positions, and is silently left out where none is.
    """
    extent = target._extent
    if extent is None or not isinstance(source, MaskedTensor):
        return
    if _have_the_same(target, extent, source._printed_record):
        return
    written = record_below(source if source.shape == target.shape else source.detach().expand(target.shape))
    positions = None if is_all_valid(written) else conjunction(factors_of(record_below(target)))
    if positions is None or not may_be_read(positions):
        return
    lost = int(confined(written, as_int8(as_bool(positions).logical_not())).count())
    if lost:
        shapes = f"a masked tensor of shape {tuple(source.shape)} to one of shape {tuple(target.shape)}"
        dropped(str(op), f"{shapes} would skip {lost} valid elements where it has no positions", TO_PADDED, lost)


def say_what_is_carried_on(op: OpOverload, target: Tensor, source: Tensor) -> None:
    """Warn or raise, as `updates` says, where a step's state is written to a part of a plain tensor: the states that
    samples carry past their end are numbers there.
    """
    extent, base = source._extent if isinstance(source, MaskedTensor) else None, target._base
    if extent is None or base is None or base.ndim <= target.ndim:
        return
    for state in extent.states:
        has_step = state.there.there
        past = None if not may_be_read(has_step) else has_step.numel() - int(has_step.sum())
        if past != 0:
            shapes = f"a masked tensor of shape {tuple(source.shape)} to a plain tensor of shape {tuple(target.shape)}"
            dropped(str(op), f"{shapes} would write states of samples past their end", STATES, past)
            return


# ---------------------------------------------------------------------------------------------------- states of modules

# The module whose state is being loaded: what arrives replaces what its tensors knew of padding.
_loading: ContextVar[nn.Module | None] = ContextVar("masked_dispatch.loading", default=None)


def load_state(original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """torch's `_load_from_state_dict`, which copies into the parameters and buffers of a module."""
    token = _loading.set(module)
    try:
        original(module, *args, **kwargs)
    finally:
        _loading.reset(token)


def has_padded_state(module: nn.Module, *_: object, **__: object) -> bool:
    """Whether a parameter or a buffer of a module knows which of its positions are there."""
    return any(isinstance(t, MaskedTensor) and t._extent is not None for t in _state_of(module))


def _state_of(module: nn.Module) -> Iterator[Tensor | None]:
    return itertools.chain(module._parameters.values(), module._buffers.values())


def before_copy(target: MaskedTensor) -> None:
    """Before `target.copy_(source)`: while a module loads its state, its tensors forget which positions are there."""
    module = _loading.get()
    if module is not None and any(tensor is target for tensor in _state_of(module)):
        forget_extent(target)


def install() -> None:
    """The package calls this once, on import."""
    replace(nn.Module, "_load_from_state_dict", load_state, has_padded_state)
