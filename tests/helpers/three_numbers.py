"""Three numbers, of which the second is invalid, and what of them can be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md

NAN = float("nan")
KNOWN = torch.tensor([True, False, True])


def some(*values: float, requires_grad: bool = False) -> md.MaskedTensor:
    """Three numbers, of which the second is invalid, with NaN in its place."""
    return md.masked_tensor(torch.where(KNOWN, torch.tensor(values), NAN), KNOWN, requires_grad=requires_grad)


def shown(t: Tensor) -> list[Any]:
    assert md.is_masked_tensor(t)
    return [v if m else "--" for v, m in zip(t.get_data().flatten().tolist(), t.get_mask().flatten(), strict=True)]
