"""Normalisation on bare records: running statistics, and shapes that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bare_records import apply
from op_registry.authoring import Dense

aten = torch.ops.aten
EPS = 1e-5


def parameter(*size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, math.prod(size), dtype=torch.float64).reshape(size).requires_grad_()


def test_running_statistics_move_by_what_is_valid():
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, math.nan, math.inf], [8.0, math.nan, 4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.int8)
    for op in (aten.batch_norm.default, aten.native_batch_norm.default, aten._native_batch_norm_legit.default):
        mean, var = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([1.0, 2.0, 3.0])
        rest = (True, 0.5, EPS, False)[: len(op._schema.arguments) - 5]
        apply(op, Dense(x, mask), None, None, Dense(mean), Dense(var), *rest)
        # All of the first channel, one element of the second, none of the third.
        assert mean.tolist() == [7.0, 12.5, 30.0]
        assert var.tolist() == [7.0, 2.0, 3.0]
    mean, var = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([1.0, 2.0, 3.0])
    invalid = torch.tensor([0, 1, 1], dtype=torch.int8)
    apply(aten.batch_norm.default, Dense(x, mask), None, None, Dense(mean, invalid), Dense(var), True, 0.5, EPS, False)
    assert mean.tolist() == [10.0, 12.5, 30.0]
    op = aten._native_batch_norm_legit_functional.default
    *_, new_mean, new_var = apply(op, Dense(x, mask), None, None, Dense(mean), Dense(var), True, 0.5, EPS)
    assert (new_mean.data[1].item(), mean.tolist()) == (8.75, [10.0, 12.5, 30.0])
    assert new_var.data.tolist() == [10.0, 2.0, 3.0]


def test_running_statistics_of_instance_norm_are_means_over_samples_that_have_them():
    x = torch.tensor([[[1.0, 3.0, 9.0]], [[5.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]])
    mask = torch.tensor([[[1, 1, 0]], [[1, 0, 0]], [[0, 0, 0]]], dtype=torch.int8)
    mean, var = torch.tensor([10.0]), torch.tensor([1.0])
    apply(aten.instance_norm.default, Dense(x, mask), None, None, Dense(mean), Dense(var), True, 0.5, EPS, False)
    assert mean.item() == 0.5 * 10 + 0.5 * (2 + 5) / 2
    assert var.item() == 0.5 * 1 + 0.5 * 2


def test_shapes_that_do_not_fit_raise_as_in_torch():
    x = Dense(torch.randn(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.int8))
    with pytest.raises(RuntimeError, match="Given normalized_shape"):
        apply(aten.layer_norm.default, x, (5,))
    with pytest.raises(RuntimeError, match="divisible by"):
        apply(aten.group_norm.default, x, 2)
    with pytest.raises(RuntimeError, match="running_mean should contain 3"):
        apply(aten.batch_norm.default, x, None, None, Dense(torch.ones(4)), None, True, 0.1, EPS, False)
