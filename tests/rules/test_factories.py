"""Factories on bare records: what is allocated like a masked tensor, and what is assigned whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bare_records import apply, masked, shown
from op_registry.authoring import Dense

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


# ----------------------------------------------------------------------------------------------------- factories


def test_like_is_masked_and_new_is_plain() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert shown(apply(aten.zeros_like.default, x)) == [0.0, "--"]
    assert shown(apply(aten.full_like.default, x, 3, dtype=torch.int64)) == [3, "--"]
    assert torch.equal(apply(aten.new_zeros.default, x, [2]), torch.zeros(2))
    assert torch.equal(apply(aten.new_full.default, x, [1], 3), torch.full((1,), 3.0))
    assert isinstance(apply(aten.new_empty_strided.default, x, [2], [1]), Dense)
    assert isinstance(apply(aten.new_empty_strided.default, x, [3], [1]), Tensor)


def test_zero_and_fill_assign() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert shown(apply(aten.zero.default, x)) == [0.0, 0.0]
    assert shown(apply(aten.fill.Scalar, x, 2)) == [2.0, 2.0]
    assert shown(apply(aten.fill.Tensor, x, masked(NAN, False))) == ["--", "--"]
