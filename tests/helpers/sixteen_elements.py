"""A matrix of sixteen elements, ten of them valid, in every storage; and what of it can be seen."""

from __future__ import annotations

import torch
from torch import Tensor

import masked_dispatch as md
from storages import STORAGES

T, F = True, False
MASK = torch.tensor([[T, T, F, T], [T, F, T, T], [F, F, F, F], [T, T, T, T]])


def sample(storage: str = "dense", dtype: torch.dtype = torch.float32) -> md.MaskedTensor:
    """0 … 15 as 4 × 4, stored so."""
    return STORAGES[storage](md.masked_tensor(torch.arange(16).reshape(4, 4).to(dtype), MASK))


def state(x: Tensor) -> tuple[list[object], list[object]]:
    """The mask, and the valid elements."""
    assert isinstance(x, md.MaskedTensor)
    return x.get_mask().tolist(), x.to_tensor(1).tolist()
