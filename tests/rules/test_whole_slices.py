"""All or nothing per slice: rows that are drawn, and operators of other libraries in the category."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry import check, registry
from op_registry.authoring import whole_slices
from padded_slices import same, wrapped

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------------------------------- draws


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


# ----------------------------------------------------------------------------------------- operators of other libraries


@torch.library.custom_op("slicewise_tests::centered", mutates_args=())
def centered(x: Tensor) -> Tensor:
    """Each matrix without its mean."""
    return x - x.mean((-2, -1), keepdim=True)


@torch.library.custom_op("slicewise_tests::summed", mutates_args=())
def summed(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The running sum of each block, counted from its first element."""
    for axis in axes:
        x = x.cumsum(axis)
    return x.clone()


for operator in (centered, summed):
    operator.register_fake(lambda x, *axes: torch.empty_like(x))


def matrices_to_center(make: Callable[..., Tensor]) -> Any:
    yield (make((3, 2, 2)),)
    yield (make((2, 3, 4)),)


def blocks_to_sum(make: Callable[..., Tensor]) -> Any:
    yield make((3, 4)), [1]
    yield make((2, 3, 4)), [0, 2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("op", "traits", "samples"),
    [(centered, {}, matrices_to_center), (summed, {"over": "axes", "replacement": 0}, blocks_to_sum)],
    ids=["matrices", "blocks"],
)
def test_the_category_serves_other_libraries(op: Any, traits: dict[str, Any], samples: Any) -> None:
    with registry.overlay():
        rule = whole_slices(op._opoverload, **traits)
        rule.samples(samples)
        verdict = check(op._opoverload)
        assert verdict, str(verdict)
        assert verdict.of("P2") == "holds"
