"""Masked matrices in every storage, by name; the sparse layouts of torch among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import masked_dispatch as md

# What masked tensors can be stored in, packed storage left out.
BY_NAME = {
    "coo": torch.sparse_coo,
    "csr": torch.sparse_csr,
    "csc": torch.sparse_csc,
    "bsr": torch.sparse_bsr,
    "bsc": torch.sparse_bsc,
}
LAYOUTS = list(BY_NAME.values())

Conversion = Callable[[Any], md.MaskedTensor]


def block_size(x: md.MaskedTensor) -> tuple[int, int]:
    """The smallest blocks of more than one element, in each dimension that has any: prime factors of the sizes."""
    rows, columns = (next((n for n in range(2, size + 1) if size % n == 0), 1) for size in x.shape[-2:])
    return rows, columns


STORAGES: dict[str, Conversion] = {
    "dense": lambda x: x,
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(sparse_dim=1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr(block_size(x)),
    "bsc": lambda x: x.to_sparse_bsc(block_size(x)),
    "packed": lambda x: x.to_packed().without_extent(),  # (storage alone is compared)
    "permuted": lambda x: x.t().to_sparse(sparse_dim=1).t().clone(),  # by itself, not the view
}


def storages_but(*names: str) -> dict[str, Conversion]:
    """Every storage but those named."""
    assert set(names) <= STORAGES.keys()
    return {name: stored for name, stored in STORAGES.items() if name not in names}
