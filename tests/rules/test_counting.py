"""Valid elements are counted eight at a time, and exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.records import counting
from op_registry.records.counting import count_ones

SHAPES = [(4096, 24), (24, 4096), (3, 300, 128), (70_000,), (2041 * 8,), (8, 8, 8, 256), (1, 65_536), (257, 8), (8, 7)]


@given(st.sampled_from(SHAPES), st.data(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0, 3, 8]))
def test_counts_are_exact(
    shape: tuple[int, ...], data: st.DataObject, keepdim: bool, share: float, offset: int
) -> None:
    """Also in lanes that are full: 255 ones fit into one, 256 would not."""
    dims = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    ones = (torch.rand(math.prod(shape) + offset, generator=generator) < share).to(torch.int8)[offset:].view(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_WORTH_IT", 1)
        count = count_ones(ones, dims, keepdim)
    assert torch.equal(count.to(torch.int64), ones.sum(dims, keepdim=keepdim)), (dims, offset)


class Sums(TorchDispatchMode):
    """The dtype and the number of elements of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.sum:
            self.seen.append((args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_large_mask_is_not_summed_byte_by_byte(dims: tuple[int, ...]) -> None:
    ones = torch.ones(1 << 10, 1 << 10, dtype=torch.int8)
    with Sums() as sums:
        count_ones(ones, dims, False)
    assert max(n for dtype, n in sums.seen if dtype is torch.int64) <= 1 << 17
    assert max(n for dtype, n in sums.seen if dtype is not torch.int64) <= 1 << 13
