"""Constructors: data that requires grad, masked arrays of NumPy, and sequences of different lengths."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence as torch_pad_sequence

import masked_dispatch as md
from few_elements import F, T, rows_of
from few_elements import padded_by_hand as by_hand

MASK = torch.tensor([True, False, True])


def leaf() -> Tensor:
    return torch.arange(3.0).requires_grad_()


DATA: dict[str, Callable[[], Any]] = {
    "a result": lambda: leaf() * 2,
    "a leaf": leaf,
    "a parameter": lambda: nn.Linear(3, 1).weight[0],
    "a masked result": lambda: md.as_masked_tensor(leaf(), MASK) * 2,
    "a sparse result": lambda: leaf().to_sparse() * 2,
}


@pytest.mark.parametrize("data", DATA)
def test_data_that_requires_grad_is_copied_with_a_warning_at_the_callers_line(data: str) -> None:
    source = DATA[data]()
    with pytest.warns(UserWarning, match="no gradient reaches data") as caught:
        x = md.masked_tensor(source, MASK)
    assert x.is_leaf
    assert not x.requires_grad
    (warning,) = caught
    assert str(warning.message) == (
        "masked_tensor(data, mask) copies data of shape (3,), which requires grad, into a leaf: no gradient reaches "
        "data. as_masked_tensor(data, mask) keeps the graph; to cut it on purpose, write "
        "masked_tensor(data.detach(), mask)"
    )
    assert linecache.getline(warning.filename, warning.lineno).strip() == "x = md.masked_tensor(source, MASK)"


@pytest.mark.parametrize("data", DATA)
def test_both_ways_out_say_nothing(data: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert md.as_masked_tensor(DATA[data](), MASK).requires_grad
        assert md.masked_tensor(DATA[data]().detach(), MASK, requires_grad=True).is_leaf
        with torch.no_grad():
            assert md.masked_tensor(DATA[data](), MASK).is_leaf


# ------------------------------------------------------------------------------- masked arrays of NumPy keep their mask

NAN = float("nan")


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


# --------------------------------------------------------------------------------------------------------- pad_sequence

SIDES: list[Literal["left", "right"]] = ["left", "right"]


@pytest.mark.parametrize("kind", ["plain", "masked", "mixed"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_padding_is_invalid_and_rows_keep_their_masks(
    kind: str, batch_first: bool, side: Literal["left", "right"]
) -> None:
    rows = rows_of(kind)
    x = md.pad_sequence(rows, batch_first, padding_side=side)
    data, mask = by_hand(rows, batch_first, side)
    assert torch.equal(x.get_mask(), mask)
    assert torch.equal(x.to_tensor(0), data)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged], ids=str)
def test_rows_in_any_storage(layout: torch.layout) -> None:
    rows = rows_of("masked")[:3]
    x = md.pad_sequence([row.to_layout(layout) for row in rows], batch_first=True)
    data, mask = by_hand(rows, True, "right")
    assert torch.equal(x.get_mask(), mask)
    assert torch.equal(x.to_tensor(0), data)


def test_what_lies_under_the_rows_masks_changes_nothing() -> None:
    row = torch.tensor([1.0, float("nan"), 3.0])
    x = md.pad_sequence([md.masked_tensor(row, torch.tensor([T, F, T])), torch.ones(2)], batch_first=True)
    assert float(x.sum()) == 6
    assert int(x.count()) == 4


@pytest.mark.parametrize("kind", ["plain", "masked", "mixed"])
@pytest.mark.parametrize("side", SIDES)
def test_gradients_reach_the_rows(kind: str, side: Literal["left", "right"]) -> None:
    rows = [row.requires_grad_() for row in rows_of(kind)]
    (md.pad_sequence(rows, padding_side=side) ** 2).sum().backward()
    for row in rows:
        grad = row.grad
        assert grad is not None
        assert type(grad) is type(row)
        if isinstance(grad, md.MaskedTensor):
            assert torch.equal(grad.get_mask(), row.get_mask())
            grad, row = grad.to_tensor(0), row.detach().to_tensor(0)
        assert torch.equal(grad, 2 * row.detach())


def test_torch_pads_with_valid_numbers() -> None:
    rows = [md.masked_tensor(torch.ones(2), torch.tensor([T, F])), torch.ones(1)]
    x = torch_pad_sequence(rows, batch_first=True)
    assert isinstance(x, md.MaskedTensor)
    assert x.get_mask().tolist() == [[T, F], [T, T]]
    assert x.to_tensor(-1).tolist() == [[1, -1], [1, 0]]


def test_errors_are_torchs() -> None:
    with pytest.raises(RuntimeError, match="empty list of sequences"):
        md.pad_sequence([])
    with pytest.raises(RuntimeError, match="padding_side"):
        md.pad_sequence([torch.ones(2)], padding_side="top")  # type: ignore[arg-type]
