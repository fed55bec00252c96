"""Every storage of masked matrices, by name, the sparse layouts of torch, and small matrices that are stored so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


T, F = True, False
MASK = torch.tensor([[T, T, F, T], [T, F, T, T], [F, F, F, F], [T, T, T, T]])


def sample(storage: str = "dense", dtype: torch.dtype = torch.float32) -> md.MaskedTensor:
    """0 … 15 as 4 × 4, stored so."""
    return STORAGES[storage](md.masked_tensor(torch.arange(16).reshape(4, 4).to(dtype), MASK))


def state(x: Tensor) -> tuple[list[object], list[object]]:
    """The mask, and the valid elements."""
    assert isinstance(x, md.MaskedTensor)
    return x.get_mask().tolist(), x.to_tensor(1).tolist()


def some(layout: torch.layout = torch.sparse_csr) -> Any:
    """Two rows, partly valid, in a sparse storage."""
    mask = torch.tensor([[T, T, F], [T, F, F]])
    return md.masked_tensor(torch.arange(1.0, 7.0).reshape(2, 3), mask).to_layout(layout)


def permuted() -> md.MaskedTensor:
    """(4, 3): the transpose of rows, one of which is absent and one partly valid."""
    mask = torch.tensor([[T, F, T, T], [F] * 4, [T, T, F, T]])
    data = torch.where(mask, torch.arange(1.0, 13.0).reshape(3, 4), torch.nan)
    return md.masked_tensor(data, mask).to_sparse(1).t()
