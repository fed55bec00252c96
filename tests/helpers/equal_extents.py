"""Comparison of tensors that know which of their positions are there."""

from __future__ import annotations

import torch
from torch import Tensor

import masked_dispatch as md


def same(found: Tensor, expected: Tensor) -> None:
    """Equal extents and masks, close values where these are valid."""
    assert isinstance(found, md.MaskedTensor)
    assert isinstance(expected, md.MaskedTensor)
    assert found.get_mask().tolist() == expected.get_mask().tolist()
    assert (found.extent is None) == (expected.extent is None)
    assert found.extent is None or found.extent.tolist() == expected.extent.tolist()
    torch.testing.assert_close(found.to_tensor(0), expected.to_tensor(0), rtol=1e-12, atol=1e-12)
