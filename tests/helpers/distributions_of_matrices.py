"""Distributions over vectors and matrices, with a hole in one of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributions as D
from torch import Tensor

from padded_slices import wrapped

BATCH, SIZE, DRAWS = 3, 4, 5
Parameters = dict[str, Tensor]


def parameters() -> Parameters:
    """Good parameters of every distribution below, with the batch in front."""
    torch.manual_seed(0)
    factor = torch.randn(BATCH, SIZE, SIZE, dtype=torch.float64)
    covariance = factor @ factor.mT + SIZE * torch.eye(SIZE)
    return {
        "loc": torch.randn(BATCH, SIZE, dtype=torch.float64),
        "covariance_matrix": covariance,
        "precision_matrix": covariance,
        "scale_tril": torch.linalg.cholesky(covariance),
        "cov_factor": factor[..., :2].contiguous(),
        "cov_diag": torch.rand(BATCH, SIZE, dtype=torch.float64) + 0.5,
        "df": torch.rand(BATCH, dtype=torch.float64) + SIZE + 2,
        "concentration": torch.rand(BATCH, dtype=torch.float64) + 0.5,
    }


Make = Callable[..., D.Distribution]
KINDS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "normal, covariance": (D.MultivariateNormal, ("loc", "covariance_matrix")),
    "normal, precision": (D.MultivariateNormal, ("loc", "precision_matrix")),
    "normal, triangle": (D.MultivariateNormal, ("loc", "scale_tril")),
    "low rank": (D.LowRankMultivariateNormal, ("loc", "cov_factor", "cov_diag")),
    "Wishart, covariance": (D.Wishart, ("df", "covariance_matrix")),
    "Wishart, triangle": (D.Wishart, ("df", "scale_tril")),
    "LKJ": (lambda **given: D.LKJCholesky(SIZE, **given), ("concentration",)),
}


def with_hole(name: str, data: Tensor, hidden: float = math.nan) -> Tensor:
    """The parameter without one element of the first of the batch: of a triangle, one below its diagonal."""
    mask = torch.ones(data.shape, dtype=torch.bool)
    mask[(0, *(-1 - d for d in range(data.dim() - 1)))[: data.dim()]] = False
    if name == "scale_tril":
        mask[0], mask[0, 2, 1] = True, False
    return wrapped(data, mask, hidden)


def made(kind: str, given: Parameters, **changed: Tensor) -> D.Distribution:
    make, names = KINDS[kind]
    return make(**{name: changed.get(name, given[name]) for name in names})


def without_first(shape: torch.Size, batch_dim: int) -> Tensor:
    """True but in the first element of the batch."""
    mask = torch.ones(shape, dtype=torch.bool)
    mask.select(batch_dim, 0).fill_(False)
    return mask
