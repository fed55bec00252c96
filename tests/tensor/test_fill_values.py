"""Values under the mask and dtypes: fills, few kernels, what is compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from storages import MASK, STORAGES, F, T, sample

NAN, INF = float("nan"), float("inf")


TOO_MUCH: list[tuple[torch.dtype, Any, str]] = [
    (torch.int64, NAN, "is not an integer"),
    (torch.int64, 1.5, "is not an integer"),
    (torch.int64, INF, "is not an integer"),
    (torch.int64, 2**63, "lies outside -9223372036854775808 to 9223372036854775807"),
    (torch.int32, 1e30, "lies outside -2147483648 to 2147483647, the range of torch.int32"),
    (torch.uint8, -1, "lies outside 0 to 255, the range of torch.uint8"),
    (torch.uint8, 256, "lies outside 0 to 255"),
    (torch.int8, 2j, "is complex"),
    (torch.float32, 2j, "is complex, which cannot be a value of torch.float32"),
    (torch.float32, 1e40, "is beyond the greatest value of torch.float32"),
    (torch.float16, 1e5, "is beyond the greatest value of torch.float16"),
    (torch.complex64, 1e40j, "is beyond the greatest value of torch.complex64"),
    (torch.bool, 2, "is neither True nor False"),
    (torch.bool, NAN, "is neither True nor False"),
]


@pytest.mark.parametrize("dtype, fill, problem", TOO_MUCH)
def test_a_fill_that_the_dtype_has_no_room_for_is_refused(dtype: torch.dtype, fill: Any, problem: str) -> None:
    layout = "csr" if dtype.is_signed else "dense"
    with pytest.raises(ValueError, match=rf"^the fill \S+ {problem}"):
        sample(layout, dtype).to_tensor(fill)


FITS: list[tuple[torch.dtype, Any, Any]] = [
    (torch.int64, 3.0, 3),
    (torch.int64, True, 1),
    (torch.int64, np.int64(3), 3),
    (torch.float32, np.float32(0.5), 0.5),
    (torch.uint8, 255, 255),
    (torch.float32, 0.1, torch.tensor(0.1).item()),
    (torch.float32, -INF, -INF),
    (torch.float16, 2, 2.0),
    (torch.float32, 2 + 0j, 2.0),
    (torch.complex64, 2j, 2j),
    (torch.bool, 1, True),
    (torch.bool, False, False),
]


@pytest.mark.parametrize("dtype, fill, expected", FITS)
def test_a_fill_that_fits_is_put_in_place(dtype: torch.dtype, fill: Any, expected: Any) -> None:
    layout = "dense" if isinstance(fill, float) else "csr"
    filled = sample(layout, dtype).to_tensor(fill)
    assert filled.dtype is dtype
    assert type(filled) is Tensor
    assert filled[2].tolist() == [expected] * 4


def test_other_fills_are_refused_with_what_to_do() -> None:
    x = sample()
    for fill in ("mean", [0.0]):
        with pytest.raises(
            TypeError, match=r"^the fill is .*; it has to be a number or a plain tensor that broadcasts"
        ):
            x.to_tensor(fill)  # type: ignore[arg-type]
    for none in ((), (None,)):
        with pytest.raises(TypeError, match=r"^to_tensor\(fill\) takes the value .* no default: each use chooses"):
            x.to_tensor(*none)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 4\), which does not broadcast to the tensor's shape \(4, 4\)"):
        x.to_tensor(torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match=r"shape \(3,\), which does not broadcast"):
        x.to_tensor(torch.ones(3))
    with pytest.raises(TypeError, match="the fill is itself a masked tensor"):
        x.to_tensor(sample())
    with pytest.raises(ValueError, match=r"the fill has dtype torch.float32, whose values torch.int64 cannot hold"):
        sample(dtype=torch.int64).to_tensor(torch.ones(4))
    with pytest.raises(ValueError, match="is not an integer"):
        sample("bsr", torch.int64).to_torch_sparse(NAN)


# -------------------------------------------------------------------------------------------- dtypes with few kernels


UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.int16, torch.int64], ids=str)
def test_lengths_of_any_integers(dtype: torch.dtype) -> None:
    data = torch.zeros(2, 3)
    x = md.from_lengths(data, torch.tensor([1, 3], dtype=dtype))
    assert x.get_mask().tolist() == [[True, False, False], [True, True, True]]
    with pytest.raises(ValueError, match="lengths run from 1 to 4, but dimension 1 has 3 positions"):
        md.from_lengths(data, torch.tensor([1, 4], dtype=dtype))


# --------------------------------------------------------------------------------------------------------- compressed


@pytest.mark.parametrize("layout", STORAGES)
def test_compressed_gives_the_valid_elements_in_order(layout: str) -> None:
    x = sample(layout).requires_grad_()
    found = x.compressed()
    assert type(found) is Tensor
    assert found.tolist() == torch.arange(16.0).reshape(4, 4)[MASK].tolist()
    (found * torch.arange(10.0)).sum().backward()
    assert isinstance(x.grad, md.MaskedTensor)
    assert torch.equal(x.grad.get_mask(), MASK)
    assert x.grad.to_tensor(0)[MASK].tolist() == list(range(10))


@pytest.mark.parametrize("mask", [None, torch.tensor([T, F, T, T]), torch.zeros(4, 4, dtype=torch.bool)])
def test_compressed_under_masks_of_other_shapes(mask: Tensor | None) -> None:
    data = torch.arange(16.0).reshape(4, 4).t()
    found = md.as_masked_tensor(data, mask).compressed()
    assert found.tolist() == data[torch.ones(4, 4, dtype=torch.bool) if mask is None else mask.expand(4, 4)].tolist()
    assert md.masked_tensor(5.0).compressed().tolist() == [5.0]
