"""Convert the operands of a collective to records, and write its results to the outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from masked_dispatch.tensor.extent_sharing import forget_extent, receive_extent
from masked_dispatch.tensor.mask_sharing import shared_validity, write_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, with_extent, wrap
from masked_dispatch.tensor.messages import with_copied_mask, written_through_view
from masked_dispatch.torch_internals import share_memory
from op_registry import MaskedSemanticsError
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent


def record_of(tensor: Tensor) -> Dense:
    """Return data, validity and extent without autograd; a plain tensor is valid everywhere."""
    if isinstance(tensor, MaskedTensor):
        data = tensor._data  # avoid a new view: the data itself keeps more information, such as its known zeros
        return Dense(data.detach() if data.requires_grad else data, shared_validity(tensor), tensor._extent)
    return Dense(tensor.detach(), None)


def is_partial(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors stores a mask."""
    return any(type(t) is MaskedTensor and t._validity is not None for t in tensors)


def problem_of_outputs(outputs: Iterable[Tensor]) -> str | None:
    """Say why the outputs cannot take results, or None; callers check this before they send anything."""
    for tensor in outputs:
        if isinstance(tensor, MaskedTensor) and tensor._mask_is_a_copy and complex_base(tensor) is None:
            return f"the result would be written through {with_copied_mask(tensor)}. Pass the base, or a clone."
    return None


def complex_base(tensor: MaskedTensor) -> Tensor | None:
    """Return the complex tensor that torch.distributed passed to `torch.view_as_real`; None for other tensors."""
    base = tensor._base
    if base is None or not base.is_complex() or tensor.is_complex() or tensor.shape[-1:] != (2,):
        return None
    strides = [stride // 2 for stride in tensor.stride()[:-1]]
    if base.shape == tensor.shape[:-1] and list(base.stride()) == strides:
        return base
    return base.as_strided(tensor.shape[:-1], strides, tensor.storage_offset() // 2)


def owns_memory(tensor: Tensor) -> TypeGuard[MaskedTensor]:
    """Return whether a collective may reduce in place in the tensor's data."""
    return type(tensor) is MaskedTensor and not tensor._mask_is_a_copy


def write(target: Tensor, record: Dense) -> None:
    """Write the received record to `target`: data, mask and extent to a masked tensor, which has them from then on;
    only valid elements to a plain one.
    """
    with torch.no_grad():
        data, validity = record.data.view(target.shape), record.validity
        if owns_memory(target) and share_memory(data, target._data):
            replace_extent(target, record.extent)
            # The data was reduced in place; copy_ would copy it onto itself.
            torch.autograd.graph.increment_version([target, target._data])
            write_validity(target, validity)
            receive_extent(target, record.extent)
            return
        if validity is not None:
            validity = validity.view(torch.int8).view(target.shape)
        arrived: Tensor = with_extent(wrap(data, validity), record.extent)
        if isinstance(target, MaskedTensor) and target._mask_is_a_copy:
            target, arrived = complex_base(target), torch.view_as_complex(arrived)  # type: ignore[assignment]
        if isinstance(target, MaskedTensor):
            replace_extent(target, arrived._extent)  # type: ignore[attr-defined]
        target.copy_(arrived)


def replace_extent(target: MaskedTensor, received: Extent | None) -> None:
    """Let a tensor be without the extent that it has, before it receives another, or none.

    Raises MaskedSemanticsError for a view of another extent: its base could not learn of the received one.
    """
    own = target._extent
    if target._base is not None and (own.places if own else ()) != (received.places if received else ()):
        raise MaskedSemanticsError(written_through_view(target))
    forget_extent(target)
