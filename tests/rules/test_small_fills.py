"""A small fill with zeros is one operator that selects: the same values, bits and derivatives as torch.where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from called_operators import Calls
from op_registry.records.fill import fill_where_invalid, small_as_large, zero_selector

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MASK = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.int8)
MASKS = {"elements": MASK, "rows": MASK[:, :1].clone(), "columns": MASK[:1].clone(), "larger": MASK.repeat(4, 1, 1)}
HIDDEN = (float("nan"), float("inf"), float("-inf"))


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = a.dtype is b.dtype and a.shape == b.shape
    return kind and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("dtype", [*REAL, *INTEGERS, torch.complex64, torch.bool], ids=str)
def test_the_values_are_those_of_where(dtype: torch.dtype, which: str) -> None:
    validity = MASKS[which]
    data = torch.tensor([[5, 1, 2], [3, 0, 4]]).to(dtype)
    assert (zero_selector(data, validity, 0) is None) is (dtype in (torch.complex64, torch.bool))
    assert same_bits(fill_where_invalid(data, validity, 0), torch.where(validity == 1, data, 0).to(dtype))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_nothing_hidden_gets_through_and_nothing_valid_is_changed(dtype: torch.dtype) -> None:
    for value in HIDDEN:
        hidden = torch.where(MASK == 1, 1, value).to(dtype)
        assert torch.equal(fill_where_invalid(hidden, MASK, 0), (MASK == 1).to(dtype))
    valid = torch.tensor([[-0.0, 0, torch.nan], [0, torch.inf, -torch.inf]], dtype=dtype)
    filled = fill_where_invalid(valid, MASK, 0)
    torch.testing.assert_close(filled, torch.where(MASK == 1, valid, 0), rtol=0, atol=0, equal_nan=True)
    assert bool(filled[0, 0].signbit())


@pytest.mark.parametrize("value", [-0.0, 1, float("inf"), float("nan")])
def test_only_a_positive_zero_is_selected(value: float) -> None:
    data = torch.ones(2, 3)
    assert zero_selector(data, MASK, value) is None
    filled = fill_where_invalid(data, MASK, value)
    assert same_bits(filled, torch.where(MASK == 1, data, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_a_large_fill_tells_a_negative_zero_from_a_positive_one(dtype: torch.dtype) -> None:
    data = torch.ones(2, 3, dtype=dtype)
    with small_as_large():
        fills = [fill_where_invalid(data, MASK, value) for value in (0.0, -0.0, 0.0)]
    for found, value in zip(fills, (0.0, -0.0, 0.0), strict=True):
        assert same_bits(found, torch.where(MASK == 1, data, torch.tensor(value, dtype=dtype)))


@pytest.mark.parametrize("which", MASKS)
def test_derivatives_of_both_orders_are_those_of_where(which: str) -> None:
    validity = MASKS[which]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad((fill**3).sum(), x, create_graph=True)[0]
        for fill in (fill_where_invalid(x, validity, 0), torch.where(validity == 1, x, 0))
    )
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad((g * g).sum(), x, retain_graph=True)[0] for g in (found, expected)))


def test_a_gradient_that_is_nan_where_invalid_gets_zero_there() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    fill_where_invalid(x, MASK, 0).backward(torch.where(MASK == 1, 2.0, torch.nan))
    assert x.grad is not None
    assert torch.equal(x.grad, 2.0 * MASK)


def test_a_mask_that_is_written_to_selects_anew() -> None:
    validity = MASK.clone()
    data = torch.ones(2, 3)
    fill_where_invalid(data, validity, 0)
    validity[0, 1] = 1
    assert torch.equal(fill_where_invalid(data, validity, 0), validity.to(torch.float32))


def test_what_inference_mode_selects_by_is_not_kept() -> None:
    validity = MASK.clone()
    with torch.inference_mode():
        fill_where_invalid(torch.ones(2, 3), validity, 0)
    x = torch.ones(2, 3, requires_grad=True)
    fill_where_invalid(x, validity, 0).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, MASK.to(torch.float32))


def test_a_small_fill_is_one_operator() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with Calls() as calls:
        fill_where_invalid(x, MASK, 0)
        fill_where_invalid(x, MASK, 0)
    names = [str(op) for op in calls.seen]
    assert [name for name in names if "_to_copy" not in name] == ["aten.threshold_backward.default"] * 2
