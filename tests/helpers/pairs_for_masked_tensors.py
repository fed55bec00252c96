"""What stands for masked tensors in an exported program: pairs of data and mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from compiled_regions import NAN

BATCH, LENGTH = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """What a program takes in place of a masked tensor; NaN where it is invalid."""
    return x.to_dense().to_tensor(NAN), x.get_mask()


def expected(y: Any) -> Any:
    """What a program returns in place of masked tensors."""
    return torch.utils._pytree.tree_map(lambda t: (t.to_tensor(0), t.get_mask()) if md.is_masked_tensor(t) else t, y)
