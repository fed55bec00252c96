"""Which positions of a tensor are there, when it is written to, gets other dimensions in place, or another's shape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from masked_dispatch.autograd.reached import joined
from masked_dispatch.autograd.sparse import unwrap_any, wrap_any
from masked_dispatch.dispatch.run_rule import Kernel
from masked_dispatch.dispatch.sparse_writes import record_below
from masked_dispatch.replacements import replace
from masked_dispatch.tensor.extent_sharing import forget_extent
from masked_dispatch.tensor.mask_sharing import shared_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.messages import extent_not_carried, written_through_view
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor
from masked_dispatch.torch_internals import DispatchKeySet
from masked_dispatch.update_policy import STATES, TO_PADDED, dropped
from op_registry import MaskedSemanticsError, resolve
from op_registry.extents.factors import confined, conjunction, factors_of
from op_registry.extents.follow import is_all_valid
from op_registry.extents.found import there_too
from op_registry.extents.run import run_with_extents
from op_registry.extents.writes import explicit, of_target, same_mask
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.tracing import assert_when_run, being_traced, may_be_read
from op_registry.records.validity import as_bool, as_int8

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


def receive_extent(target: MaskedTensor, source: Tensor) -> None:
    """Before a write: the extent of what is written is the target's from now on, and that of all that share its memory.

    The functional form that computed `source` intersected it with the target's own; without one, that stays.
    """
    received, own = source._extent if isinstance(source, MaskedTensor) else None, target._extent
    states = () if received is None else received.states
    if _have_the_same(target, source) or not (states or (received or own).factors):  # type: ignore[union-attr]
        return
    if isinstance(target, SparseMaskedTensor):
        target._replace_extent(own if received is None else received)
        return
    if target._family is not None and being_traced(target._data):
        _same_in_graph(target, source)
        return
    before = Dense(target._data, target._validity, own)
    if received is None:
        received = Extent(explicit(factors_of(before)), is_mask=False)
    if target._family is None:
        with_extent(target, received)
        return
    assert isinstance(source, MaskedTensor)
    target._family.receive_extent(target, before, Dense(source._data, shared_validity(source), received))


def _have_the_same(target: MaskedTensor, source: Tensor) -> bool:
    """Whether two tensors have one extent, and the same mask where that is their extent: no look at their booleans."""
    extent = target._extent
    if not isinstance(source, MaskedTensor):
        return extent is None
    if source._extent is not extent or extent is None or not extent.is_mask:
        return source._extent is extent
    return same_mask([target._printed_record, source._printed_record])  # (records as they are stored)


def _same_in_graph(target: MaskedTensor, source: Tensor) -> None:
    """Assert that a write to memory that others share changes no extent: a graph cannot change what they know."""
    own, received = target._extent, source._extent if isinstance(source, MaskedTensor) else None
    if own is None or received is None or len(own.states) != len(received.states):
        raise MaskedSemanticsError(written_through_view(target))
    if own.places != received.places or (own.is_mask and not received.is_mask):
        raise MaskedSemanticsError(written_through_view(target))
    mine, other = torch.ops.masked_dispatch.extent(target), torch.ops.masked_dispatch.extent(source)
    assert_when_run(mine == other, written_through_view(target))


def where_there(target: MaskedTensor, source: Tensor) -> Tensor:
    """What is written, valid only where the target is there."""
    if target._family is None or target._family.extent is None:
        return source
    masked = isinstance(source, MaskedTensor)
    validity = shared_validity(source) if isinstance(source, MaskedTensor) else None
    found = target._family.validity_there(target, validity)
    if found is validity:
        return source
    return wrap(source._data if masked else source, found)  # type: ignore[attr-defined]


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
    if extent is None or not isinstance(source, MaskedTensor) or _have_the_same(target, source):
        return
    written = record_below(source if source.shape == target.shape else source.detach().expand(target.shape))
    there = None if is_all_valid(written) else conjunction(factors_of(record_below(target)))
    if there is None or not may_be_read(there):
        return
    lost = int(confined(written, as_int8(as_bool(there).logical_not())).count())
    if lost:
        shapes = f"a masked tensor of shape {tuple(source.shape)} to one of shape {tuple(target.shape)}"
        dropped(str(op), f"{shapes} would skip {lost} valid elements where it has no positions", TO_PADDED, lost)


def shaped_like(decompose: Kernel) -> Kernel:
    """The kernel of an operator whose results take their shapes from its tensors: `expand_as`, `broadcast_tensors`.

    A result takes the extent of a tensor, too, along dimensions whose positions this numbers and its own source does
    not. `decompose` computes the results, as torch does.
    """

    def kernel(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        result = decompose(keyset, *args, **kwargs)
        if isinstance(result, Tensor):
            return _with_extent_of(result, *args, *kwargs.values())
        (tensors,) = args or kwargs.values()
        return [_with_extents_of(r, tensor, tensors) for r, tensor in zip(result, tensors, strict=True)]

    return kernel


def _with_extents_of(result: Tensor, source: Tensor, targets: Sequence[Tensor]) -> Tensor:
    for target in targets:
        if target is not source and target.ndim == result.ndim:
            result = _with_extent_of(result, source, target)
    return result


def _with_extent_of(result: Tensor, source: Tensor, target: Tensor) -> Tensor:
    if not isinstance(target, MaskedTensor) or target._extent is None:
        return result
    for factor in of_target(record_below(target), record_below(source)):
        record = unwrap_any(result)
        result = joined(result, record, wrap_any(there_too(record, factor)))
    return result


def say_what_is_carried_on(op: OpOverload, target: Tensor, source: Tensor) -> None:
    """Warn or raise, as `updates` says, where a step's state is written to a part of a plain tensor: the states that
    samples carry past their end are numbers there.
    """
    extent, base = source._extent if isinstance(source, MaskedTensor) else None, target._base
    if extent is None or base is None or base.ndim <= target.ndim:
        return
    for state in extent.states:
        there = state.there.there
        past = None if not may_be_read(there) else there.numel() - int(there.sum())
        if past != 0:
            shapes = f"a masked tensor of shape {tuple(source.shape)} to a plain tensor of shape {tuple(target.shape)}"
            dropped(str(op), f"{shapes} would write states of samples past their end", STATES, past)
            return
