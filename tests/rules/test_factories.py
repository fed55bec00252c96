"""Factories on bare records: what is allocated like a masked tensor, and what is assigned whole."""

from __future__ import annotations

import math

import torch

from bare_records import apply, masked, shown

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


# ----------------------------------------------------------------------------------------------------- factories


def test_like_has_the_mask_and_new_is_valid_or_uninitialised() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert shown(apply(aten.zeros_like.default, x)) == [0.0, "--"]
    assert shown(apply(aten.full_like.default, x, 3, dtype=torch.int64)) == [3, "--"]
    assert shown(apply(aten.new_zeros.default, x, [2])) == [0.0, 0.0]
    assert shown(apply(aten.new_full.default, x, [1], 3)) == [3.0]
    for uninitialised in (
        apply(aten.empty_like.default, x),
        apply(aten.new_empty.default, x, [2]),
        apply(aten.new_empty_strided.default, x, [2], [1]),
    ):
        assert shown(uninitialised) == ["--", "--"]


def test_zero_and_fill_assign() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert shown(apply(aten.zero.default, x)) == [0.0, 0.0]
    assert shown(apply(aten.fill.Scalar, x, 2)) == [2.0, 2.0]
    assert shown(apply(aten.fill.Tensor, x, masked(NAN, False))) == ["--", "--"]
