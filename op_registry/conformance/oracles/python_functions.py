"""Versions for masks of torch's Python functions that divide by a size, or that test every element.

`expected` runs these in place of torch's; the oracles compute their operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The mean over valid classes."""
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return _reduced(loss.mean(-1), reduction)


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """'batchmean' divides by the rows that have a valid element."""
    if reduction != "batchmean":
        return F.kl_div(input, target, size_average, reduce, reduction, log_target)
    elements = F.kl_div(input, target, reduction="none", log_target=log_target)
    if elements.ndim == 0:
        return elements
    rows = torch.ones_like(elements).flatten(1).amax(1) if elements.ndim > 1 else torch.ones_like(elements)
    return elements.sum() / rows.sum()


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Only a valid variance may be refused as negative; without a valid one, none is negative."""
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.clone()
    return loss.mean() if reduction == "mean" else loss.sum()


PYTHON_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multilabel_soft_margin_loss: multilabel_soft_margin_loss,
    F.kl_div: kl_div,
    F.gaussian_nll_loss: gaussian_nll_loss,
}


def as_oracles_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call in place of `function`; the oracles compute its operators."""
    return PYTHON_FUNCTIONS.get(function, function)
