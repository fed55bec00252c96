"""masked_tensor cuts the graph of its data, as torch.tensor does, and says so."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md

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
