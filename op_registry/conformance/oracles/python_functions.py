"""Functions that torch writes in Python and that divide by a size, written with the number of what is valid.

`expected` runs these in place of torch's; the oracles compute their operators.
"""

from __future__ import annotations

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


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss.clone()
    return loss.mean() if reduction == "mean" else loss.sum()


PYTHON_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multilabel_soft_margin_loss: multilabel_soft_margin_loss,
    F.kl_div: kl_div,
}


def as_oracles_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in place of `function`, whose operators the oracles compute."""
    return PYTHON_FUNCTIONS.get(function, function)
