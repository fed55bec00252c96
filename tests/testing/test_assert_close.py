"""assert_close, torch's and this library's, compares masks, what is valid and, if asked, which positions are there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch

import masked_dispatch as md
from storages import STORAGES, F, T, sample

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "layout, assert_close",
    zip(STORAGES, cycle([torch.testing.assert_close, md.testing.assert_close]), strict=False),
)
def test_assert_close_compares_masks(assert_close: Callable[..., None], layout: str) -> None:
    x = sample(layout)
    assert_close(x, sample(layout))
    assert_close(x, sample())
    assert_close([x, {"a": x}], [sample(), {"a": sample()}])
    fewer = x.mask_with(torch.tensor([T, F, T, T]))
    with pytest.raises(
        AssertionError, match=r"Masks are not equal!\n\nMismatched elements: 2 / 16 \(12.5%\)\n"
    ) as error:
        assert_close(x, fewer)
    assert "First at index (0, 1): valid in actual, invalid in expected" in str(error.value)
    assert "Valid elements: 10 in actual, 8 in expected" in str(error.value)
    with pytest.raises(AssertionError, match="Masks are not equal"):
        assert_close(x, x.to_tensor(0))
    with pytest.raises(AssertionError, match="Masks are not equal"):
        assert_close(x.to_tensor(0), x)
    with pytest.raises(AssertionError, match="Tensor-likes are not close!"):
        assert_close(x, x + 1)
    assert_close(x, x + 1, atol=1, rtol=0)
    with pytest.raises(AssertionError, match="The values for attribute 'shape' do not match"):
        assert_close(x, x[:2])
    with pytest.raises(AssertionError, match="The values for attribute 'dtype' do not match"):
        assert_close(x, x.double())


def test_assert_close_sees_nothing_under_a_mask() -> None:
    a = md.masked_tensor([1.0, NAN], [T, F])
    b = md.masked_tensor([1.0, INF], [T, F])
    md.testing.assert_close(a, b)
    md.testing.assert_close(md.masked_tensor([NAN, 1.0], [T, F]), md.masked_tensor([NAN, 2.0], [T, F]), equal_nan=True)
    with pytest.raises(AssertionError, match="Masks are not equal"):
        md.testing.assert_close(md.masked_tensor([1.0, 2.0], [T, F]), md.masked_tensor([5.0, 6.0], [F, T]))
    md.testing.assert_close(md.masked_tensor(torch.zeros(2)), torch.zeros(2))
    torch.testing.assert_close(torch.ones(2), torch.ones(2))
    with pytest.raises(AssertionError, match="Tensor-likes are not equal"):
        torch.testing.assert_close(torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


THERE = torch.tensor([[True, True, True], [True, False, False]])


def batch() -> md.MaskedTensor:
    return md.padded(md.masked_tensor(torch.ones(2, 3), THERE))


def test_extents_are_compared_if_asked() -> None:
    x = batch()
    missing = md.padded(x, torch.tensor([[True, True, True], [True, True, False]]))
    for other, there in ((missing, 5), (x.without_extent(), 6)):
        md.testing.assert_close(x, other)
        torch.testing.assert_close(x, other)
        with pytest.raises(AssertionError, match="Extents are not equal!") as error:
            md.testing.assert_close({"a": [x]}, {"a": [other]}, check_extent=True)
        assert f"Mismatched elements: {there - 4} / 6" in str(error.value)
        assert "First at index (1, 1): not there in actual, there in expected" in str(error.value)
        assert f"Elements that are there: 4 in actual, {there} in expected" in str(error.value)
    with pytest.raises(AssertionError, match="Masks are not equal!"):
        md.testing.assert_close(x, x.mask_with(THERE[:1] & ~THERE[1:]), check_extent=True)


def test_equal_extents_are_equal_however_they_are_kept() -> None:
    x = batch()
    md.testing.assert_close(x, md.padded(x.without_extent(), THERE), check_extent=True)
    whole = md.masked_tensor(torch.ones(2, 3))
    md.testing.assert_close(md.padded(whole), torch.ones(2, 3), check_extent=True)
    md.testing.assert_close(torch.ones(2), torch.ones(2), check_extent=True)
    with pytest.raises(AssertionError, match="Tensor-likes are not close!"):
        md.testing.assert_close(x, x + 1, check_extent=True)
    md.testing.assert_close(x, x + 1, check_extent=True, atol=1, rtol=0)
