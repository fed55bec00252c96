"""Two rows, partly valid, in a sparse storage."""

from __future__ import annotations

from typing import Any

import torch

import masked_dispatch as md

MASK = torch.tensor([[True, True, False], [True, False, False]])


def some(layout: torch.layout = torch.sparse_csr) -> Any:
    return md.masked_tensor(torch.arange(1.0, 7.0).reshape(2, 3), MASK).to_layout(layout)
