"""Where elements lie in memory: validity for operators that address memory by strides."""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8


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
