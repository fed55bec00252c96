"""All or nothing per slice: rows that are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from padded_slices import same, wrapped


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
