"""Masked tensors of which the same elements are valid whatever their sizes."""

from __future__ import annotations

import torch

import masked_dispatch as md
from compiled_regions import masked


def upper_left(rows: int, columns: int) -> md.MaskedTensor:
    """A masked tensor of which the same elements are valid whatever its sizes."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[:2, :2] = True
    return masked(rows, columns, mask=mask)
