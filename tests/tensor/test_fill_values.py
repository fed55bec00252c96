"""to_tensor(fill): which fills a dtype has room for, and what is said of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sixteen_elements import sample

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
