"""Distributions with masked parameters in compiled code: likelihoods and draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distributions_of_matrices import BATCH, DRAWS, SIZE, made, parameters, with_hole, without_first
from padded_slices import same

IN_A_GRAPH = [("normal, covariance", "loc"), ("normal, triangle", "scale_tril"), ("low rank", "loc")]


@pytest.mark.parametrize(("kind", "name"), IN_A_GRAPH)
def test_compiled(kind: str, name: str) -> None:
    """Plain torch cannot compile draws of Wishart and LKJ in one graph; with a masked `cov_diag` torch's line that adds
    an identity is a write that a graph cannot express, and refused by name."""
    given = parameters()
    value = torch.randn(BATCH, SIZE, dtype=torch.float64)

    def program(hole: Tensor) -> tuple[Tensor, Tensor]:
        distribution = made(kind, given, **{name: hole})
        return distribution.log_prob(value), distribution.rsample((DRAWS,))

    hole = with_hole(name, given[name])
    likelihood, draws = torch.compile(program, fullgraph=True, backend="aot_eager")(hole)
    same(likelihood, program(hole)[0], without_first(likelihood.shape, 0))
    assert torch.equal(draws.get_mask(), without_first(draws.shape, 1))
