"""Factories: like a masked tensor, on another device; what is assigned whole; and random draws, for every position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import masked_dispatch as md
from bare_records import apply, masked, shown
from op_registry import MaskedSemanticsError
from padded_slices import same, wrapped
from storages import STORAGES, storages_but

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


# -------------------------------------------------------------------------------------------------- on another device


OF_A_MASK: dict[str, Callable[..., Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x, **options: torch.full_like(x, 2.0, **options),
    "rand_like": torch.rand_like,
    "randint_like": lambda x, **options: torch.randint_like(x, 3, **options),
}


# Each function, and each storage.
IN_STORAGES = [
    *((function, "dense") for function in OF_A_MASK),
    *zip(itertools.cycle(OF_A_MASK), storages_but("dense"), strict=False),
]

# Of the mask, or of the pattern of what is stored.
UNKNOWN = (
    r"a mask of shape \(.*\) on meta has no values, so that it is unknown what would be valid on cpu"
    r"|a tensor of sizes \(\d, \d\), stored sparsely \(.*\), is on meta, where it is unknown which elements are stored"
)


def of_kind(storage: str) -> Any:
    mask = torch.tensor([[True, True, False, False], [False, False, True, False]])
    return STORAGES[storage](md.masked_tensor(torch.arange(8.0).reshape(2, 4), mask))


@pytest.mark.parametrize(("function", "storage"), IN_STORAGES)
def test_on_meta_as_on_the_cpu(function: str, storage: str) -> None:
    x = of_kind(storage)
    there = OF_A_MASK[function](x, device="meta")
    assert md.is_masked_tensor(there)
    assert (there.shape, there.dtype, there.device.type) == (x.shape, x.dtype, "meta")


@pytest.mark.parametrize(("function", "storage"), IN_STORAGES)
def test_a_mask_on_meta_is_unknown_elsewhere(function: str, storage: str) -> None:
    """It failed in the copy of the mask: "Cannot copy out of meta tensor; no data!"."""
    x = of_kind(storage).to("meta")
    with pytest.raises(MaskedSemanticsError, match=UNKNOWN):
        OF_A_MASK[function](x, device="cpu")


def test_what_is_uninitialised_needs_no_mask() -> None:
    x = of_kind("dense").to("meta")
    for made in (torch.empty_like(x, device="cpu"), x.new_empty(3, device="cpu")):
        assert made.device.type == "cpu"
        assert not made.get_mask().any()


def test_a_module_with_a_masked_parameter_goes_from_meta_to_a_state() -> None:
    """Module.to_empty allocates with empty_like; what is loaded then makes it valid."""
    layer = nn.Linear(4, 2, bias=False)
    state = {"weight": torch.arange(8.0).reshape(2, 4)}
    layer.weight = nn.Parameter(of_kind("dense"))
    layer = layer.to("meta").to_empty(device="cpu")
    assert not layer.weight.get_mask().any()
    layer.load_state_dict(state)
    torch.testing.assert_close(layer.weight.detach(), md.masked_tensor(state["weight"]))


# -------------------------------------------------------------------------------------------------------- random


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


# ------------------------------------------------------------------------------------------ rows that are drawn whole


def draws(sample: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(0)
    return sample()


@pytest.mark.parametrize("hidden", [math.nan, math.inf, -1.0, 0.0])
def test_dirichlet_and_beta_draw_whole_rows(hidden: float) -> None:
    data = torch.rand(3, 4, dtype=torch.float64) + 0.5
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2] = False
    x = wrapped(data, mask, hidden)
    drawn = draws(lambda: torch._sample_dirichlet(x))
    rows = mask.all(1, keepdim=True)
    same(drawn, draws(lambda: torch._sample_dirichlet(torch.where(rows, data, 1.0))), rows)
    dirichlet = torch.distributions.Dirichlet(x, validate_args=False)
    (slope,) = torch.autograd.grad(draws(dirichlet.rsample).square().sum(), x)
    assert slope.get_data()[slope.get_mask()].isfinite().all()
    assert torch.equal(slope.get_mask(), mask)
    beta = torch.distributions.Beta(x, torch.ones(3, 4, dtype=torch.float64), validate_args=False)
    assert torch.equal(draws(beta.rsample).get_mask(), mask)
