"""Copy masked tensors for `torch.distributed.checkpoint.async_save`, which writes the copies while training goes on.

torch's stagers copy the memory of each tensor, but a masked tensor has several pieces of memory. Here the stagers copy
these pieces like any tensors, with their usual pinning and reuse, and new masked tensors are built from the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager

from masked_dispatch.replacements import replace
from masked_dispatch.tensor.checks import contains_masked
from masked_dispatch.tensor.masked_tensor import MaskedTensor, rebuild, with_extent
from masked_dispatch.tensor.sparse_tensor import SparseMaskedTensor, rebuild_sparse, stored_parts
from op_registry.records.extent import Extent

Stage = Callable[..., Any]


def in_pieces(value: Any) -> Any:
    """Copy the nested containers, with a tuple of pieces in place of each masked tensor."""
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
    """Rebuild the masked tensors of `value` from the staged pieces."""
    if isinstance(value, SparseMaskedTensor):
        *parts, order = staged
        return with_extent(rebuild_sparse(*parts, False, False, order), on(parts[0].device, value._extent))
    if isinstance(value, MaskedTensor):
        return with_extent(rebuild(*staged, False), on(staged[0].device, value._extent))
    if isinstance(value, dict):
        return {key: together(inner, staged[key]) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(together(inner, copied) for inner, copied in zip(value, staged, strict=True))
    return staged


def on(device: torch.device, extent: Extent | None) -> Extent | None:
    """Return an extent with its booleans on a device; nobody writes to them, so they need no copies there."""
    if extent is None:
        return None
    moved = tuple(factor.moved_by(lambda there: there.to(device)) for factor in extent.factors)
    return Extent(moved, extent.is_mask)


def stages_masked(stager: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether the state contains masked tensors."""
    return contains_masked(state_dict)


def stage_pieces(stage: Stage, stager: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Copy a state, including the pieces of masked tensors."""
    copies = stage(stager, in_pieces(state_dict), *args, **kwargs)
    return later(state_dict, copies) if isinstance(copies, Future) else together(state_dict, copies)


def later(state_dict: dict[str, Any], copies: Future[Any]) -> Future[Any]:
    """Return a future of the staged state, which another thread copies."""
    done: Future[Any] = Future()

    def finish(copied: Future[Any]) -> None:
        try:
            done.set_result(together(state_dict, copied.result()))
        except Exception as error:
            done.set_exception(error)

    copies.add_done_callback(finish)
    return done


def install() -> None:
    """later_import.py calls this once, after the import of torch.distributed.checkpoint."""
    for stager in (DefaultStager, BlockingAsyncStager):
        replace(stager, "stage", stage_pieces, stages_masked)
