"""Data that functions which produce sparse storage are called with."""

from __future__ import annotations

import torch
from torch import Tensor


def data(shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
