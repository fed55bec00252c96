"""Masked samples that function transforms are tried on, dense and in every sparse storage; how results are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import comparison
import masked_dispatch as md
from storages import storages_but

NAN = float("nan")
MASK = torch.tensor([[True, True, False, True], [False, False, False, False], [True, False, True, False]])


def sample(seed: int = 0, requires_grad: bool = False) -> md.MaskedTensor:
    """3 × 4 with NaN under the mask, and a row that is invalid throughout."""
    data = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    return md.masked_tensor(torch.where(MASK, data, NAN), MASK, requires_grad=requires_grad)


SHAPE = (4, 6, 8)


def dense(seed: int = 0) -> md.MaskedTensor:
    """A padded batch with NaN as padding, of which one sequence is empty."""
    data = torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    valid = (torch.arange(6) < torch.tensor([2, 6, 0, 4])[:, None])[..., None].expand(SHAPE)
    return md.masked_tensor(torch.where(valid, data, NAN), valid)


STORED = storages_but("dense", "permuted")
layouts = pytest.mark.parametrize("storage", STORED)


def same(actual: Any, expected: Any, layout: torch.layout | None = None) -> None:
    """As in `comparison`, stored so if that is said."""
    assert layout is None or actual.storage_layout is layout
    comparison.same(actual, expected, equal_nan=False)
