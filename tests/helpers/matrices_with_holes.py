"""Functions of low rank, and masks with holes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lobpcg": lambda a: torch.lobpcg(a @ a.mT + torch.eye(9), k=1, niter=3),
    "svd_lowrank": lambda a: torch.svd_lowrank(a, q=2),
    "pca_lowrank": lambda a: torch.pca_lowrank(a, q=2),
}
# One hole; a row of holes; holes that leave a valid element in every row and column; nothing.
HOLES: dict[str, Callable[[], torch.Tensor]] = {
    "one": lambda: torch.arange(81).reshape(9, 9) != 80,
    "row": lambda: (torch.arange(9) != 3)[:, None].expand(9, 9),
    "diagonal": lambda: ~torch.eye(9, dtype=torch.bool),
    "all": lambda: torch.zeros(9, 9, dtype=torch.bool),
}
