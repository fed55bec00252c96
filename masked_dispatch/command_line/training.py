"""A small network trained on rows with holes, which must not depend on what lies in the holes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from masked_dispatch.api.construct import masked_tensor

STEPS, ROWS, FEATURES = 300, 256, 6


def losses(hidden: float, advance: Callable[[], None]) -> list[float]:
    """The loss after each step, with `hidden` in place of the 30 % of features that are missing."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(ROWS, FEATURES, generator=generator)
    target = data @ torch.linspace(-1, 1, FEATURES)[:, None] + data[:, :1] * data[:, 1:2]
    mask = torch.rand(ROWS, FEATURES, generator=generator) > 0.3
    x = masked_tensor(torch.where(mask, data, hidden), mask)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return [step(model, optimizer, x, target, advance) for _ in range(STEPS)]


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, advance: Callable[[], None]
) -> float:
    """One step; its loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    advance()
    return loss.item()
