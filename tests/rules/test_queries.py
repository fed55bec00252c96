"""Queries on bare records: equality, distinct values, membership, what has no answer. Counts the laws ask."""

from __future__ import annotations

import math

import pytest
import torch

from bare_records import apply, masked, shown
from op_registry import InvalidValueError, MaskedSemanticsError
from op_registry.authoring import Dense

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


def test_item_raises_where_there_is_no_value() -> None:
    assert apply(aten._local_scalar_dense.default, masked(3.0, True)) == 3.0
    with pytest.raises(InvalidValueError, match=r"shape \(1,\).*invalid.*x\.to_tensor\(0\)"):
        apply(aten._local_scalar_dense.default, masked([3.0], [0]))
    with pytest.raises(ValueError, match=r"x\.to_tensor\(False\)"):
        apply(aten._local_scalar_dense.default, masked(True, False))


def test_equal_compares_masks_and_valid_values() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert apply(aten.equal.default, x, masked([1.0, INF], [1, 0]))
    assert not apply(aten.equal.default, x, masked([1.0, 0.0], [1, 1]))
    assert not apply(aten.equal.default, x, Dense(torch.tensor([1.0, 0.0])))
    assert not apply(aten.equal.default, x, masked([1.0], [1]))
    assert apply(aten.allclose.default, x, masked([1.0 + 1e-9, 5.0], [1, 0]))
    assert not apply(aten.allclose.default, x, Dense(torch.tensor([1.0, 0.0])))


def test_unique_of_valid_elements_with_a_masked_inverse() -> None:
    x = masked([2.0, NAN, 1.0, 2.0], [1, 0, 1, 1])
    values, inverse, counts = apply(aten._unique2.default, x, True, True, True)
    assert values.tolist() == [1.0, 2.0]
    assert shown(inverse) == [1, "--", 0, 1]
    assert counts.tolist() == [1, 2]
    values, _, _ = apply(aten.unique_consecutive.default, masked([1.0, NAN, 1.0, 2.0], [1, 0, 1, 1]))
    assert values.tolist() == [1.0, 2.0]
    with pytest.raises(MaskedSemanticsError, match="unique_dim"):
        apply(aten.unique_dim.default, x, 0)


def test_isin_knows_valid_elements_only() -> None:
    x, known = masked([1, 2, 3], [1, 1, 0]), masked([1, 2], [1, 0])
    assert shown(apply(aten.isin.Tensor_Tensor, x, known)) == [True, False, "--"]
    assert shown(apply(aten.isin.Tensor_Tensor, x, masked([1, 2], [0, 0]), invert=True)) == [True, True, "--"]
