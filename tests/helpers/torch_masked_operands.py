"""Rows of every kind of validity, and what torch.masked is told to let in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import masked_dispatch as md

NAN = math.nan
T, F = True, False
# Rows: all valid, some, one, none.
VALID = torch.tensor([[T, T, T, T], [T, F, T, T], [F, F, T, F], [F, F, F, F]])
# Columns of the table below: what mask= lets in.
LET_IN = torch.tensor([T, F, T, F])


def values() -> Tensor:
    return torch.rand(VALID.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5


def x(garbage: float = NAN, requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(torch.where(VALID, values(), garbage), VALID, requires_grad=requires_grad)
