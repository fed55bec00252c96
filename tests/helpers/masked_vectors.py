"""Vectors of four elements, their masks, and what of them can be seen; the shape and mask of many rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md

NAN, INF = math.nan, math.inf
T, F = True, False
FIRST = torch.tensor([T, T, F, F])
SECOND = torch.tensor([T, F, T, F])
EITHER = FIRST | SECOND
BIG = (64, 512)
BIG_ROWS = (torch.arange(64) % 3 > 0)[:, None]


def masked(values: Any, mask: Tensor, garbage: float = NAN, **options: Any) -> md.MaskedTensor:
    data = torch.tensor(values, dtype=torch.float64)
    return md.masked_tensor(torch.where(mask, data, garbage), mask, **options)


def shown(x: Any) -> list[Any]:
    """The elements, None where invalid."""
    return [value if valid else None for value, valid in zip(x.get_data().tolist(), x.get_mask().tolist(), strict=True)]
