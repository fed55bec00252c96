"""Three numbers, of which the second is invalid, and what of them can be seen; an adaptive softmax with its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md

NAN = float("nan")
KNOWN = torch.tensor([True, False, True])


def some(*values: float, requires_grad: bool = False) -> md.MaskedTensor:
    """Three numbers, of which the second is invalid, with NaN in its place."""
    return md.masked_tensor(torch.where(KNOWN, torch.tensor(values), NAN), KNOWN, requires_grad=requires_grad)


def shown(t: Tensor) -> list[Any]:
    assert md.is_masked_tensor(t)
    return [v if m else "--" for v, m in zip(t.get_data().flatten().tolist(), t.get_mask().flatten(), strict=True)]


def rows_and_classes() -> tuple[nn.Module, Tensor, Tensor]:
    """An adaptive softmax with rows and classes for it."""
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])
    return layer, torch.randn(4, 16), torch.tensor([1, 6, 12, 3])


def without_second_row(x: Tensor) -> md.MaskedTensor:
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[1] = False
    return md.masked_tensor(torch.where(mask, x, NAN), mask)
