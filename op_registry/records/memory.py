"""New memory, and where elements lie in memory: validity for operators that address it by strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced, under_transform
from op_registry.records.validity import as_int8

aten = torch.ops.aten


def new_buffer(data: Tensor, *, valid: bool) -> Dense:
    """New memory, all of it valid or none of it.

    In a graph and inside transforms the mask is stored in full, because writes to it cannot change how it is stored.
    """
    if being_traced(data) or under_transform():
        make = torch.ones_like if valid else torch.zeros_like
        return Dense(data, make(data, dtype=torch.int8))
    return Dense(data, None if valid else data.new_zeros((1,) * data.ndim, dtype=torch.int8))


def validity_in_strides_of_data(
    x: Dense, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> Tensor:
    """The validity with the data's strides, element for element where the data is in memory.

    For a view of the data's memory of this size, stride and offset; refused where that may show more than `x` does.
    """
    memory, v = torch.empty_like(x.data, dtype=torch.int8), as_int8(full_mask(x))
    if memory.stride() == x.data.stride():
        return torch.ones_like(x.data, dtype=torch.int8) & v
    if not _lies_apart(x.data) or not _shows(x.data, size, stride, storage_offset):
        raise MaskedSemanticsError(
            f"as_strided of data of shape {tuple(x.shape)} and strides {x.data.stride()} may reach elements that "
            "the tensor does not show, and nothing says whether they are valid. Use slices, or x.contiguous() first."
        )
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.data.stride(), strict=True))
    with_gaps = aten.as_strided_scatter(v.new_zeros(span), v, x.shape, x.data.stride())
    return with_gaps.as_strided(x.shape, x.data.stride())


def _lies_apart(data: Tensor) -> bool:
    """Whether no two elements are known to share memory: each dimension steps beyond all that are inside it."""
    inside = 0
    for s, n in sorted((s, n) for n, s in zip(data.shape, data.stride(), strict=True) if n != 1):
        if n == 0 or s <= inside:
            return False
        inside += (n - 1) * s
    return True


def _shows(data: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> bool:
    """Whether `data`, whose elements lie apart, shows all that such a view does: some of its dimensions, or a part."""
    if any(n == 0 for n in size):
        return True
    left = [(s, n) for n, s in zip(data.shape, data.stride(), strict=True) if n != 1]
    for n, s in zip(size, stride, strict=False):
        if n != 1:
            of_data = [dim for dim in left if dim[0] == s and n <= dim[1]]
            if not of_data:
                return False
            left.remove(of_data[0])
    return storage_offset is None or storage_offset == data.storage_offset()


def offset_within_data(x: Dense, storage_offset: int | None) -> int | None:
    """A storage offset into the data's memory, relative to the data's first element."""
    return None if storage_offset is None else storage_offset - int(x.data.storage_offset())
