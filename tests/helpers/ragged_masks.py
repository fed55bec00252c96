"""A masked tensor of ragged rows, and its mask as a list."""

from __future__ import annotations

import torch
from torch import Tensor

import masked_dispatch as md

NAN = float("nan")
T, F = True, False


def ragged(requires_grad: bool = False) -> md.MaskedTensor:
    data = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 6.0]])
    return md.masked_tensor(data, ~data.isnan(), requires_grad=requires_grad)


def mask_of(x: Tensor) -> list[object]:
    assert isinstance(x, md.MaskedTensor)
    mask: list[object] = x.get_mask().tolist()
    return mask
