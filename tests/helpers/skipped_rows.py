"""A matrix whose rows have from four valid elements to none, and how results of it are compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md

NAN = math.nan
MASK = torch.tensor(
    [
        [True, True, True, True],
        [True, False, True, True],
        [False, False, True, True],
        [False, False, False, True],
        [False, False, False, False],
    ]
)


def data(garbage: float = NAN) -> Tensor:
    values = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    return torch.where(MASK, values, garbage)


def masked(garbage: float = NAN, requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(data(garbage), MASK, requires_grad=requires_grad)


def results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def same(got: Any, want: Any) -> None:
    for a, b in zip(results(got), results(want), strict=True):
        assert torch.equal(a.get_mask(), b.get_mask())
        assert_close(a.to_tensor(0), b.to_tensor(0), equal_nan=True)  # a variance of one element
