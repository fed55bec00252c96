"""New memory, and validity laid out like the data, for operators that address memory by strides."""

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
    """A record around new memory, with all elements valid or none.

    In a graph and inside transforms it stores the mask in full, because later writes cannot change the mask's storage.
    """
    if being_traced(data) or under_transform():
        make = torch.ones_like if valid else torch.zeros_like
        return Dense(data, make(data, dtype=torch.int8))
    return Dense(data, None if valid else data.new_zeros((1,) * data.ndim, dtype=torch.int8))


def validity_in_strides_of_data(
    x: Dense, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> Tensor:
    """The validity with the data's strides, so that each element's validity has the element's offset in memory.

    The caller makes a view with this size, stride and offset; raises if the view may show elements that `x` does not.
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
    """Whether we know that no two elements share memory: each dimension steps beyond the extent of all inner ones."""
    inside = 0
    for s, n in sorted((s, n) for n, s in zip(data.shape, data.stride(), strict=True) if n != 1):
        if n == 0 or s <= inside:
            return False
        inside += (n - 1) * s
    return True


def _shows(data: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> bool:
    """Whether such a view shows only elements of `data`, which lie apart: a part of them, or some of its dimensions."""
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
