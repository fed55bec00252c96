"""assert_close compares which positions are there, if asked."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md

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
