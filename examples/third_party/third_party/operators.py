"""Four operators as any library has them: custom operators with derivatives, which know nothing of masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("third_party::soft_sign", mutates_args=())
def soft_sign(x: Tensor, scale: float = 1.0) -> Tensor:
    """``x / (scale + |x|)``, element by element."""
    return x / (scale + x.abs())


@torch.library.custom_op("third_party::noisy_or", mutates_args=())
def noisy_or(p: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The probability that at least one of independent events happens: ``1 - prod(1 - p)`` over `dim`."""
    return 1 - (1 - p).prod(dim, keepdim=keepdim)


@torch.library.custom_op("third_party::weighted_mean", mutates_args=())
def weighted_mean(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """``sum(weight * x) / sum(weight)`` over `dim`; both of one shape."""
    return (weight * x).sum(dim) / weight.sum(dim)


@torch.library.custom_op("third_party::row_dot", mutates_args=())
def row_dot(x: Tensor, vector: Tensor) -> Tensor:
    """The product of each row of a matrix (n, m) with a vector (m,): (n,)."""
    return (x * vector).sum(1)


# ------------------------------------------------------------------------------------------------- shapes for compilers


@soft_sign.register_fake
def _(x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.empty_like(x)


@noisy_or.register_fake
def _(p: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return torch.prod(p, dim, keepdim=keepdim)


@weighted_mean.register_fake
def _(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    return (weight * x).sum(dim)


@row_dot.register_fake
def _(x: Tensor, vector: Tensor) -> Tensor:
    return (x * vector).sum(1)


# ---------------------------------------------------------------------------------------------------------- derivatives


def _save_soft_sign(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


def _soft_sign_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * ctx.scale / (ctx.scale + x.abs()) ** 2, None


soft_sign.register_autograd(_soft_sign_backward, setup_context=_save_soft_sign)


def _save_noisy_or(ctx: Any, inputs: Any, output: Any) -> None:
    p, ctx.dim, ctx.keepdim = inputs
    ctx.save_for_backward(p)


def _noisy_or_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (p,) = ctx.saved_tensors
    if p.ndim == 0:
        return grad.clone(), None, None
    not_happening = 1 - p
    # The product of all the others: of those before and of those behind.
    ones = torch.ones_like(p.narrow(ctx.dim, 0, min(1, p.shape[ctx.dim])))
    before = torch.cat([ones, not_happening], ctx.dim).cumprod(ctx.dim).narrow(ctx.dim, 0, p.shape[ctx.dim])
    behind = torch.cat([ones, not_happening.flip(ctx.dim)], ctx.dim).cumprod(ctx.dim)
    behind = behind.narrow(ctx.dim, 0, p.shape[ctx.dim]).flip(ctx.dim)
    return (grad if ctx.keepdim else grad.unsqueeze(ctx.dim)) * before * behind, None, None


noisy_or.register_autograd(_noisy_or_backward, setup_context=_save_noisy_or)


def _save_weighted_mean(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.dim = inputs
    ctx.save_for_backward(x, weight)


def _weighted_mean_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    total = weight.sum(ctx.dim, keepdim=True)
    mean = (weight * x).sum(ctx.dim, keepdim=True) / total
    grad = grad.reshape(total.shape)
    return grad * weight / total, grad * (x - mean) / total, None


weighted_mean.register_autograd(_weighted_mean_backward, setup_context=_save_weighted_mean)


def _save_row_dot(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _row_dot_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, vector = ctx.saved_tensors
    return grad.unsqueeze(1) * vector, (grad.unsqueeze(1) * x).sum(0)


row_dot.register_autograd(_row_dot_backward, setup_context=_save_row_dot)
