"""numpy.ma's arrays as data keep their mask, and data and mask that are exchanged are suspected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import masked_dispatch as md

NAN = float("nan")
T, F = True, False


@pytest.mark.parametrize("make", [md.masked_tensor, md.as_masked_tensor, md.from_nan])
def test_a_masked_array_keeps_its_mask(make: Callable[..., md.MaskedTensor]) -> None:
    array = np.ma.array([[1.0, -999.0, 3.0], [4.0, 5.0, -999.0]], mask=[[0, 1, 0], [0, 0, 1]])
    x = make(array)
    assert x.get_mask().tolist() == (~array.mask).tolist()
    assert x.mean().item() == array.mean()
    assert x.dtype is torch.float64


def test_a_masked_array_and_a_mask_intersect() -> None:
    array = np.ma.array([1.0, 2.0, 3.0], mask=[T, F, F])
    assert md.masked_tensor(array, torch.tensor([T, T, F])).get_mask().tolist() == [F, T, F]
    assert md.as_masked_tensor(array, [1, 1, 0]).get_mask().tolist() == [F, T, F]
    assert md.from_lengths(np.ma.array([[1.0, 2.0]], mask=[[T, F]]), torch.tensor([2])).get_mask().tolist() == [[F, T]]
    array = np.ma.array([1.0, NAN, 3.0], mask=[T, F, F])
    assert md.from_nan(array).get_mask().tolist() == [F, F, T]  # type: ignore[arg-type]


def test_a_masked_array_without_a_mask_is_valid_everywhere_and_shares_memory() -> None:
    array = np.ma.array([1.0, 2.0])
    x = md.as_masked_tensor(array)
    assert x.get_mask().all()
    array[0] = 7.0
    assert x[0].item() == 7.0


def test_a_masked_array_as_mask_is_refused() -> None:
    with pytest.raises(TypeError, match="the mask is itself a masked array of NumPy"):
        md.masked_tensor(torch.zeros(2), np.ma.array([T, F], mask=[F, T]))


def test_exchanged_data_and_mask_are_suspected() -> None:
    for make in (md.masked_tensor, md.as_masked_tensor):
        for data in (torch.arange(16.0).reshape(4, 4), torch.arange(16).reshape(4, 4)):
            with pytest.raises(
                (TypeError, ValueError), match=r"Are the two arguments exchanged\? The data comes first"
            ):
                make(torch.ones(4, 4, dtype=torch.bool), data)
    with pytest.raises(TypeError, match=r"Compare it: mask > 0.5\.$"):
        md.masked_tensor(torch.zeros(2), torch.zeros(2))
