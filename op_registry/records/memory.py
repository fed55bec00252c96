"""New memory, and where elements lie in memory: validity for operators that address it by strides."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced, under_transform
from op_registry.records.validity import as_int8


def new_buffer(data: Tensor, *, valid: bool) -> Dense:
    """New memory, all of it valid or none of it.

    In a graph and inside transforms the mask is stored in full, because writes to it cannot change how it is stored.
    """
    if being_traced(data) or under_transform():
        make = torch.ones_like if valid else torch.zeros_like
        return Dense(data, make(data, dtype=torch.int8))
    return Dense(data, None if valid else data.new_zeros((1,) * data.ndim, dtype=torch.int8))


def validity_in_strides_of_data(x: Dense) -> Tensor:
    """The validity with the data's strides: element for element where the data is in memory."""
    memory = torch.empty_like(x.data, dtype=torch.int8)
    if memory.stride() != x.data.stride():
        raise MaskedSemanticsError(
            f"as_strided of data of shape {tuple(x.shape)} and strides {x.data.stride()} may reach elements that "
            "the tensor does not show, and nothing says whether they are valid. Use slices, or x.contiguous() first."
        )
    v = full_mask(x)
    return torch.ones_like(x.data, dtype=torch.int8) & as_int8(v)


def offset_within_data(x: Dense, storage_offset: int | None) -> int | None:
    """A storage offset into the data's memory, relative to the data's first element."""
    return None if storage_offset is None else storage_offset - int(x.data.storage_offset())
