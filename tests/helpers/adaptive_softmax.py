"""An adaptive softmax with rows and classes for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import masked_dispatch as md

NAN = float("nan")


def rows_and_classes() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])
    return layer, torch.randn(4, 16), torch.tensor([1, 6, 12, 3])


def without_second_row(x: Tensor) -> md.MaskedTensor:
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[1] = False
    return md.masked_tensor(torch.where(mask, x, NAN), mask)
