"""Masked samples that function transforms are tried on, dense and in every sparse storage; how results are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

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
    """Equal masks and equal valid values, stored so if that is said; plain where plain is expected."""
    assert layout is None or actual.storage_layout is layout
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            same(a, e)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            same(actual[key], expected[key])
    elif isinstance(expected, md.MaskedTensor):
        assert isinstance(actual, md.MaskedTensor), f"plain {type(actual)} where a masked tensor is expected"
        assert_close(actual.get_mask(), expected.get_mask())
        assert_close(actual.to_tensor(0), expected.to_tensor(0))
    else:
        assert not isinstance(actual, md.MaskedTensor), "masked where a plain tensor is expected"
        assert_close(actual, expected)
