"""Every pooling function of one to three dimensions on a partly valid batch, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md

Pool = Callable[[Tensor], Tensor]


def pools(n: int) -> dict[str, Pool]:
    """Each pooling function of n dimensions, with defaults and with one number for all dimensions."""

    def named(name: str) -> Callable[..., Any]:
        return getattr(F, f"{name}{n}d")  # type: ignore[no-any-return]

    average, maximum, norm = named("avg_pool"), named("max_pool"), named("lp_pool")
    found: dict[str, Pool] = {
        "avg": lambda x: average(x, 2),
        "avg, overlapping": lambda x: average(x, 3, 1),
        "avg, by ceil": lambda x: average(x, 3, 2, 1, True, False),
        "max": lambda x: maximum(x, 2),
        "max, padded": lambda x: maximum(x, 3, 2, 1),
        "max with indices": lambda x: maximum(x, 2, return_indices=True)[0],
        "lp": lambda x: norm(x + 0.1, 2.0, 2),
        "adaptive avg": lambda x: named("adaptive_avg_pool")(x, 3),
        "adaptive max": lambda x: named("adaptive_max_pool")(x, 3),
    }
    if n > 1:
        draws = torch.rand(2, 2, n)
        found["avg with divisor"] = lambda x: average(x, 2, divisor_override=3)
        found["fractional"] = lambda x: named("fractional_max_pool")(x, 2, output_size=3, _random_samples=draws)
    return found


CASES = [
    pytest.param(n, pool, meaning, id=f"{name}-{n}d-{meaning}")
    for n in (1, 2, 3)
    for name, pool in pools(n).items()
    for meaning in ("missing", "padding")
    if (name, meaning) != ("fractional", "padding")
]


def batch(n: int) -> md.MaskedTensor:
    shape = (2, 2, *[6] * n)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1, ..., 4:] = False
    mask[0, ..., 2] = False
    data = torch.rand(shape, generator=torch.Generator().manual_seed(n))
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask, requires_grad=True)


def run(pool: Pool, n: int, meaning: Any) -> tuple[Tensor, Tensor]:
    x = batch(n)
    with md.windows(meaning):
        result = pool(x)
        result.sum().backward()
    return result.detach(), x.grad
