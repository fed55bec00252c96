"""Rules compared with plain torch on slices whose invalid elements are taken out: values, masks and derivatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masks(shape: tuple[int, ...]) -> list[Tensor]:
    """Half, one slice empty, none valid, first only, all valid, broadcast."""
    generator = torch.Generator().manual_seed(0)
    half = torch.rand(shape, generator=generator) < 0.5
    empty = half.clone()
    empty[0] = False
    first = torch.zeros(shape, dtype=torch.bool)
    first[..., 0] = True
    row = half[..., :1].clone()
    return [half, empty, torch.zeros_like(half), first, torch.ones_like(half), row]


def garbage(data: Tensor, mask: Tensor, value: float) -> Tensor:
    """`data` with garbage wherever `mask` is False."""
    if not data.dtype.is_floating_point and not data.dtype.is_complex:
        info = torch.iinfo(data.dtype) if data.dtype is not torch.bool else None
        value = bool(value == 0.0) if info is None else info.min if value < 0 else info.max if value > 1 else 0
    return torch.where(mask, data, torch.full_like(data, value))


def results(value) -> list:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def loss_of(outputs: list[Tensor]) -> Tensor | None:
    """Something that weighs every differentiable output differently and is not linear in it."""
    parts = []
    for output in outputs:
        if output.requires_grad:
            weights = torch.linspace(0.5, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
            value = torch.where(output.isfinite(), output, torch.where(output.isnan(), 0, output.sgn()))
            value = value.abs().square() if value.is_complex() else value * value + value
            parts.append((weights.abs() * value).sum())
    return sum(parts[1:], parts[0]) if parts else None


def derivatives(outputs: list[Tensor], x: Tensor, mask: Tensor, order: int) -> list[Tensor]:
    """First and second derivative of the loss for the valid elements of x."""
    loss = loss_of(outputs)
    found = []
    for _ in range(order if loss is not None else 0):
        if not loss.requires_grad:
            break
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        gradient = torch.zeros_like(x) if gradient is None else torch.where(mask, gradient, 0)
        found.append(gradient.detach())
        direction = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
        loss = (gradient * direction).real.sum() if x.is_complex() else (gradient * direction).sum()
    return found


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda m: f"{what}: {m}")


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ordinary = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    tied = torch.tensor([[1.0, 2, 2, 2, 1], [0, 0, 0, 0, 0], [3, 3, 1, 3, 1], [-1, -1, -1, 2, 2]], dtype=torch.float64)
    return {"ordinary": ordinary, "tied": tied}


INF = math.inf
EXTREME = torch.tensor(
    [
        [-INF, -INF, -INF, -INF, -INF],
        [INF, INF, INF, INF, INF],
        [-INF, 1, INF, 2, -INF],
        [math.nan, 1, math.nan, -INF, 5],
    ],
    dtype=torch.float64,
)
