"""What prints for dtypes with few kernels, and the messages about integers of which torch finds no extremes."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

import masked_dispatch as md
from sparse_layouts import LAYOUTS

UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
NARROW = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float16,
    torch.bfloat16,
]


def body_of(printed: str) -> str:
    """The printed values without the name of the type and the facts after them, on one line."""
    inside = printed.partition("(")[2]
    return "".join(inside[: inside.rindex("]") + 1].split())


@pytest.mark.parametrize(
    "numbers, dtype, layout",
    [
        ([1 - 2j, 3 - 0.5j], torch.complex64, None),
        ([1 - 2j, 3 + 0.5j], torch.complex128, torch.sparse_coo),
        ([complex(1, -0.0), complex(-1, 0)], torch.complex64, torch.sparse_coo),
        ([complex(1, float("-inf")), 1j], torch.complex128, None),
    ],
    ids=["negative", "of both signs", "negative zero", "infinite"],
)
def test_complex_numbers_print_as_in_torch(
    numbers: list[complex], dtype: torch.dtype, layout: torch.layout | None
) -> None:
    data = torch.tensor(numbers, dtype=dtype)
    x = md.masked_tensor(data)
    assert body_of(repr(x if layout is None else x.to_layout(layout))) == body_of(repr(data))


def test_an_invalid_complex_number_is_as_wide_as_the_others() -> None:
    x = md.masked_tensor(torch.tensor([[1 - 2j, 3j], [3j, 1 - 2j]]), torch.tensor([[1, 0], [0, 1]]))
    assert repr(x).startswith("masked_tensor([[1.-2.j,     --],\n               [    --, 1.-2.j]]")


def test_a_conjugate_prints_its_own_sign() -> None:
    x = md.masked_tensor(torch.tensor([1 + 2j, 3j]), torch.tensor([1, 0]))
    assert body_of(repr(x.conj())) == "[1.-2.j,--]"


@pytest.mark.parametrize(
    "dtype, layout", zip(cycle(NARROW), [torch.strided, *LAYOUTS, torch.jagged], strict=False), ids=str
)
def test_narrow_floats_print(dtype: torch.dtype, layout: torch.layout) -> None:
    data = torch.tensor([[1.0, 2.5], [4.0, 0.0]]).to(dtype)
    block = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    x = md.masked_tensor(data, torch.tensor([[1, 1], [0, 1]])).to_layout(layout, blocksize=block)
    hole = "" if layout is torch.jagged else "--"  # (a packed batch stores what is there)
    assert body_of(repr(x)) == f"[[1.0000,2.5000],[{hole},0.0000]]"


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.int16, torch.int64], ids=str)
def test_a_mask_of_other_integers_than_0_and_1(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"dtype {dtype} and values between 0 and 3; .* Compare it: mask != 0"):
        md.masked_tensor(torch.zeros(3), torch.tensor([1, 3, 0], dtype=dtype))


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.int16, torch.int64], ids=str)
def test_lengths_of_any_integers(dtype: torch.dtype) -> None:
    data = torch.zeros(2, 3)
    x = md.from_lengths(data, torch.tensor([1, 3], dtype=dtype))
    assert x.get_mask().tolist() == [[True, False, False], [True, True, True]]
    with pytest.raises(ValueError, match="lengths run from 1 to 4, but dimension 1 has 3 positions"):
        md.from_lengths(data, torch.tensor([1, 4], dtype=dtype))
