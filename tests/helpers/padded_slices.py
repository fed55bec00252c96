"""Batches of which some slices are whole, some have a hole and some are padding; and how results are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import masked_dispatch as md

GARBAGE = (math.nan, math.inf, -1e300, 0.0)


def wrapped(data: Tensor, mask: Tensor, hidden: float | None = None) -> Tensor:
    """A masked leaf, with `hidden` under the mask."""
    if hidden is not None:
        data = torch.where(mask, data, torch.full_like(data, hidden))
    return md.masked_tensor(data.detach().clone(), mask, requires_grad=data.is_floating_point() or data.is_complex())


def same(masked: Tensor, plain: Tensor, mask: Tensor) -> None:
    """The mask, and plain torch's values where it is True."""
    assert torch.equal(masked.get_mask(), mask.expand(masked.shape))
    torch.testing.assert_close(masked.get_data()[mask.expand(masked.shape)], plain[mask.expand(masked.shape)])


def matrices(size: int = 3) -> tuple[Tensor, Tensor]:
    """Four positive definite matrices, and a mask: two are whole, one has a hole, one is padding."""
    torch.manual_seed(0)
    data = torch.randn(4, size, size, dtype=torch.float64)
    mask = torch.ones(data.shape, dtype=torch.bool)
    mask[1, 0, 2], mask[3] = False, False
    return data @ data.mT + torch.eye(size), mask
