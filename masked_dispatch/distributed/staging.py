"""Copies of masked tensors for `torch.distributed.checkpoint.async_save`, which trains on while they are written.

torch's stagers copy the memory of each tensor, of which a masked one has several pieces. So they are given the pieces,
which they copy as they copy any tensor, pinned or reused as they are told, and masked tensors are made of the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager

from masked_dispatch.replacements.replacing import replace
from masked_dispatch.tensor.masked_tensor import MaskedTensor, rebuild
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, rebuild_sparse, stored_parts

Stage = Callable[..., Any]


def in_pieces(value: Any) -> Any:
    """The same nested containers, with a tuple of pieces in place of each masked tensor."""
    if isinstance(value, SparseMaskedTensor):
        return (*stored_parts(value._kept), value._order)
    if isinstance(value, MaskedTensor):
        return value._data.detach(), value._validity
    if isinstance(value, dict):
        return {key: in_pieces(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(in_pieces(inner) for inner in value)
    return value


def together(value: Any, staged: Any) -> Any:
    """What was staged, with a masked tensor in place of the pieces of each in `value`."""
    if isinstance(value, SparseMaskedTensor):
        *parts, order = staged
        return rebuild_sparse(*parts, False, False, order)
    if isinstance(value, MaskedTensor):
        return rebuild(*staged, False)
    if isinstance(value, dict):
        return {key: together(inner, staged[key]) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(together(inner, copied) for inner, copied in zip(value, staged, strict=True))
    return staged


def has_masked(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_masked, value.values()))
    return any(map(has_masked, value)) if isinstance(value, (list, tuple)) else isinstance(value, MaskedTensor)


def stages_masked(stager: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
    """Whether there are masked tensors in the state."""
    return has_masked(state_dict)


def stage_pieces(stage: Stage, stager: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Copy a state, the pieces of masked tensors too."""
    copies = stage(stager, in_pieces(state_dict), *args, **kwargs)
    return later(state_dict, copies) if isinstance(copies, Future) else together(state_dict, copies)


def later(state_dict: dict[str, Any], copies: Future[Any]) -> Future[Any]:
    """The staged state when it has been copied, in another thread."""
    done: Future[Any] = Future()

    def finish(copied: Future[Any]) -> None:
        try:
            done.set_result(together(state_dict, copied.result()))
        except Exception as error:
            done.set_exception(error)

    copies.add_done_callback(finish)
    return done


def install() -> None:
    """Called once, when torch.distributed.checkpoint has been imported."""
    for stager in (DefaultStager, BlockingAsyncStager):
        replace(stager, "stage", stage_pieces, stages_masked)
