"""average: numpy.ma.average is the oracle, for every way in which weights fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import masked_dispatch as md
from masked_dispatch import interop

DATA = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [True, True, False]])
X = md.masked_tensor(DATA.masked_fill(~MASK, torch.nan), MASK)
WHOLE = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 11.0]], dtype=torch.float64)
FITTING: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "none along a dimension": (None, 1),
    "of the shape": (WHOLE, None),
    "of the shape along a dimension": (WHOLE, 0),
    "along the last dimension": (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 1),
    "along the first dimension": (torch.tensor([1.0, 2.0], dtype=torch.float64), -2),
    "of both dimensions in the other order": (WHOLE.t().contiguous(), (1, 0)),
}


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("keepdim", [False, True])
def test_weights_fit_as_in_numpy(name: str, keepdim: bool) -> None:
    weights, dim = FITTING[name]
    given = (interop.to_numpy_masked(X), dim, None if weights is None else weights.numpy())
    _, total = np.ma.average(*given, returned=True)
    theirs = np.ma.average(*given, keepdims=keepdim)
    result, sums = md.average(X, weights, dim, keepdim, returned=True)
    torch.testing.assert_close(result.to_tensor(0), torch.as_tensor(np.ma.getdata(theirs)))
    torch.testing.assert_close(sums.to_tensor(0), torch.as_tensor(np.ma.getdata(total)).reshape(sums.shape))
    assert result.get_mask().all()
    md.testing.assert_close(md.average(X, weights, dim, keepdim), result)
    md.testing.assert_close(md.average(X.to_sparse(), weights, dim, keepdim), result, check_layout=False)
    if weights is not None:
        md.testing.assert_close(md.average(X, weights.tolist(), dim, keepdim), result)


def test_an_element_takes_part_where_its_weight_is_valid_too() -> None:
    weights = md.masked_tensor([1.0, 3.0, torch.nan], [True, True, False])
    result = md.average(X, weights, 1)
    assert result.tolist() == [1, 14]
    assert md.average(DATA, weights, 1).tolist() == [1.75, 14]
    assert md.average(X, md.masked_tensor([1.0, 3.0], [False, True]), 0).get_mask().tolist() == [True, True, False]
    assert type(md.average(DATA, [1, 2, 3], 1)) is torch.Tensor


def test_half_precision_and_weights_of_0() -> None:
    assert md.average(torch.full((70000,), 2.0, dtype=torch.float16), torch.ones(70000)).item() == 2
    half = md.average(torch.full((70000,), 2.0, dtype=torch.float16))
    assert half.dtype is torch.float16
    assert half.item() == 2
    assert md.average(X, [0, 0, 0], 1).isnan().tolist() == [True, True]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: md.average(X, [1, 2, 3]),
            TypeError,
            r"name the dimensions that they belong to, average\(x, weights, dim\)",
        ),
        (lambda: md.average(X, [1, 2], 1), ValueError, r"\(2,\) do not fit a tensor of shape \(2, 3\) and dim=1"),
        (lambda: md.average(X.long()), TypeError, r"got torch.int64. Convert them: x.double\(\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
