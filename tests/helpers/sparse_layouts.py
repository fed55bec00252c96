"""The sparse layouts of torch that masked tensors can be stored in, packed storage left out."""

from __future__ import annotations

import torch

BY_NAME = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}
LAYOUTS = list(BY_NAME.values())
