"""The tensors of a collective: as records before it, written to after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from masked_dispatch.tensor.mask_sharing import shared_validity, write_validity
from masked_dispatch.tensor.masked_tensor import MaskedTensor, wrap
from masked_dispatch.torch_internals import share_memory
from op_registry.records.dense import Dense


def record_of(tensor: Tensor) -> Dense:
    """Data and validity, without derivatives; a plain tensor is valid everywhere."""
    if isinstance(tensor, MaskedTensor):
        data = tensor._data  # itself if it can be: more is known about it than about a new view, such as its zeros
        return Dense(data.detach() if data.requires_grad else data, shared_validity(tensor))
    return Dense(tensor.detach(), None)


def is_partial(tensors: Iterable[Tensor]) -> bool:
    """Whether a mask is stored for one of the tensors."""
    return any(type(t) is MaskedTensor and t._validity is not None for t in tensors)


def problem_of_outputs(outputs: Iterable[Tensor]) -> str | None:
    """Why results cannot be written, if they cannot: found before anything is sent."""
    for tensor in outputs:
        if isinstance(tensor, MaskedTensor) and tensor._mask_is_a_copy and complex_base(tensor) is None:
            return (
                f"the result would be written through a view of another dtype ({tensor.dtype}, shape "
                f"{tuple(tensor.shape)}), whose mask is a copy. Pass the base, or a clone."
            )
    return None


def complex_base(tensor: MaskedTensor) -> Tensor | None:
    """The complex tensor of which torch.distributed took `torch.view_as_real`; None if `tensor` is no such view."""
    base = tensor._base
    if base is None or not base.is_complex() or tensor.is_complex() or tensor.shape[-1:] != (2,):
        return None
    strides = [stride // 2 for stride in tensor.stride()[:-1]]
    return base.as_strided(tensor.shape[:-1], strides, tensor.storage_offset() // 2)


def owns_memory(tensor: Tensor) -> TypeGuard[MaskedTensor]:
    """Whether what is computed in place, in the tensor's data, is its result."""
    return type(tensor) is MaskedTensor and not tensor._mask_is_a_copy


def write(target: Tensor, record: Dense) -> None:
    """Let `target` be what arrived: data and mask of a masked tensor, the valid elements of a plain one."""
    with torch.no_grad():
        data, validity = record.data.view(target.shape), record.validity
        if owns_memory(target) and share_memory(data, target._data):
            # Computed in place: there is nothing to copy, and copy_ would.
            torch.autograd.graph.increment_version([target, target._data])
            write_validity(target, validity)
            return
        if validity is not None:
            validity = validity.view(torch.int8).view(target.shape)
        arrived: Tensor = wrap(data, validity)
        if isinstance(target, MaskedTensor) and target._mask_is_a_copy:
            target, arrived = complex_base(target), torch.view_as_complex(arrived)  # type: ignore[assignment]
        target.copy_(arrived)
