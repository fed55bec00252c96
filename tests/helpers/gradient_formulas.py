"""For tests of gradient formulas: statistics that a forward operator saves, and garbage under a mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from masked_dispatch import as_masked_tensor


def saved(op: Any, *args: Any) -> Any:
    """What the forward operator keeps for its gradient formula: all of its results but the first."""
    with torch.no_grad():
        return op(*args)[1:]


def hidden(data: Tensor, mask: Tensor | None) -> Tensor:
    """A masked tensor with garbage under its mask."""
    if mask is None:
        return data
    garbage = math.nan if data.is_floating_point() else 10**6
    return as_masked_tensor(torch.where(mask, data, garbage), mask)
