"""One masked tensor in every sparse storage, and how results are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import masked_dispatch as md
from storages import storages_but

SHAPE = (4, 6, 8)
NAN = float("nan")


def dense(seed: int = 0) -> md.MaskedTensor:
    """A padded batch with NaN as padding, of which one sequence is empty."""
    data = torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    valid = (torch.arange(6) < torch.tensor([2, 6, 0, 4])[:, None])[..., None].expand(SHAPE)
    return md.masked_tensor(torch.where(valid, data, NAN), valid)


STORED = storages_but("dense", "permuted")
layouts = pytest.mark.parametrize("storage", STORED)


def same(actual: Any, expected: Any, layout: torch.layout | None = None) -> None:
    """Equal masks and valid values, stored so."""
    assert torch.equal(actual.get_mask(), expected.get_mask())
    assert_close(actual.to_tensor(0), expected.to_tensor(0))
    assert layout is None or actual.storage_layout is layout
