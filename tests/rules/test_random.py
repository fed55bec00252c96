"""Random rules on bare records: they draw for every position, and what is invalid is not looked at."""

from __future__ import annotations

import math

import pytest
import torch

from bare_records import apply, masked, shown
from op_registry.authoring import Dense
from op_registry.records.validity import as_bool, as_int8

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


# -------------------------------------------------------------------------------------------------------- random


def test_dropout_draws_for_every_position() -> None:
    data, mask = torch.ones(100), torch.rand(100) < 0.5
    torch.manual_seed(0)
    plain = torch.dropout(data, 0.5, True)
    torch.manual_seed(0)
    result = apply(aten.dropout.default, Dense(torch.where(mask, data, NAN), as_int8(mask)), 0.5, True)
    assert torch.equal(result.data[mask], plain[mask])
    assert torch.equal(as_bool(result.validity), mask)


def test_dropout_of_nothing_is_the_input_itself() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert apply(aten.dropout.default, x, 0.5, False) is x
    assert apply(aten.feature_dropout.default, x, 0.0, True) is x
    with pytest.raises(RuntimeError, match="probability"):
        apply(aten.dropout.default, x, 2.0, False)


@pytest.mark.parametrize("garbage", [NAN, -1.0, 7.0])
def test_probabilities_and_rates_under_the_mask_neither_raise_nor_move_the_stream(garbage: float) -> None:
    for op, parameters in (
        (aten.bernoulli.default, 1),
        (aten.poisson.default, 1),
        (aten._standard_gamma.default, 1),
        (aten.normal.Tensor_Tensor, 2),
        (aten.binomial.default, 2),
    ):
        streams = []
        for filler in (0.5, garbage):
            torch.manual_seed(0)
            x = masked([0.5, filler, 0.5], [1, 0, 1])
            streams.append(shown(apply(op, *[x] * parameters)))
        assert streams[0] == streams[1]
        assert streams[0][1] == "--"


def test_multinomial_draws_valid_categories() -> None:
    torch.manual_seed(0)
    weights = masked([[1.0, NAN, 1.0], [NAN, NAN, NAN], [NAN, 2.0, NAN]], [[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    drawn = apply(aten.multinomial.default, weights, 50, True)
    assert set(shown(drawn)[:50]) == {0, 2}
    assert set(shown(drawn)[50:100]) == {"--"}
    assert set(shown(drawn)[100:]) == {1}
    without = apply(aten.multinomial.default, weights, 3)
    assert sorted(map(str, shown(without)[:3])) == ["--", "0", "2"]


def test_generators_assign() -> None:
    x = masked([1.0, NAN], [1, 0])
    assert apply(aten.uniform.default, x, 2.0, 3.0).validity is None
    assert apply(aten.normal_functional.default, x).validity is None
    assert shown(apply(aten.bernoulli.Tensor, x, masked([1.0, NAN], [1, 0]))) == [1.0, "--"]
