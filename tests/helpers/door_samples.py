"""Masked tensors drawn by hypothesis, and comparison bit by bit, for tests of masked_dispatch.interop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

import masked_dispatch as md

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float32, torch.float64)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-30, 3.5, -2.0)


def shapes(ndim: int, most: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, most)] * ndim)


@st.composite
def plain(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A plain tensor with the awkward numbers of its dtype."""
    n = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=dtype).reshape(shape)
    if dtype.is_floating_point or dtype.is_complex:
        numbers = draw(st.lists(st.sampled_from(SPECIAL), min_size=n, max_size=n))
        if dtype.is_complex:
            numbers = [complex(number, -number) for number in numbers]
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    bounds = torch.iinfo(dtype)
    extremes = st.sampled_from([bounds.min, bounds.max]) | st.integers(bounds.min, bounds.max)
    return torch.tensor(draw(st.lists(extremes, min_size=n, max_size=n)), dtype=dtype).reshape(shape)


@st.composite
def masked(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype], shape: st.SearchStrategy[tuple[int, ...]]
) -> md.MaskedTensor:
    """A masked tensor of one of the dtypes and of a drawn shape."""
    size = draw(shape)
    data = draw(plain(size, draw(st.sampled_from(dtypes))))
    return md.masked_tensor(data, draw(plain(size, torch.bool)))


def same(found: Tensor, expected: Tensor) -> None:
    """The same dtype, shape, mask, and, where valid, the same bits (one NaN is as good as another)."""
    assert isinstance(found, md.MaskedTensor)
    assert isinstance(expected, md.MaskedTensor)
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.get_mask(), expected.get_mask())
    assert valid_bits(found) == valid_bits(expected)


def valid_bits(tensor: Tensor) -> list[str]:
    """What is valid, as text that tells 0 from -0 and any NaN from a number."""
    mask, numbers = tensor.get_mask().flatten().tolist(), tensor.get_data().flatten().tolist()
    return [repr(number) for number, is_valid in zip(numbers, mask, strict=True) if is_valid]


@st.composite
def lengths(draw: st.DrawFn, least: int = 0, most: int = 5) -> Tensor:
    """Lengths of one to four sequences."""
    return torch.tensor(draw(st.lists(st.integers(least, most), min_size=1, max_size=4)))


def batch_of(lengths: Tensor, *sizes: int, steps: int | None = None) -> md.MaskedTensor:
    """A padded batch (B, T, *sizes) of float64 with NaN in the padding; T = steps or the longest length."""
    steps = int(lengths.max()) if steps is None else steps
    numbers = torch.arange(1.0, len(lengths) * steps * torch.Size(sizes).numel() + 1, dtype=torch.float64)
    data = numbers.reshape(len(lengths), steps, *sizes)
    mask = (torch.arange(steps) < lengths[:, None]).view(len(lengths), steps, *[1] * len(sizes))
    return md.masked_tensor(data.masked_fill(~mask, torch.nan), mask)
