"""A mask along one dimension selects in every storage, and stays in it: ``x[mask]``, ``x[:, mask]`` …"""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md
from door_samples import same

DENSE = md.masked_tensor(torch.arange(96.0).view(4, 6, 4), torch.arange(96).view(4, 6, 4) % 5 < 3)
STORED = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(x.ndim - 1),
    "csr": lambda x: x[..., 0].to_sparse_csr(),
    "csc": lambda x: x[..., 0].to_sparse_csc(),
    "bsr": lambda x: x[..., 0].to_sparse_bsr((2, 2)),
    "bsc": lambda x: x[..., 0].to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", STORED)
def test_a_mask_along_one_dimension(name: str, dim: int, masked: bool) -> None:
    x = STORED[name](DENSE)
    if dim >= x.ndim:
        return  # matrices have two
    mask = torch.arange(x.shape[dim]) % 3 != 1
    index = (*[slice(None)] * dim, md.masked_tensor(mask, torch.arange(len(mask)) > 0) if masked else mask)
    with md.densify("never"):
        found = x[index]
    assert found.storage_layout == x.storage_layout or name.startswith("bs")
    same(found.to_dense(), x.to_dense()[index])


def test_columns_with_enough_elements() -> None:
    x = DENSE[..., 0].to_sparse_csr()
    with md.densify("never"):
        assert x[:, x.count(0) > 2].shape == (4, int((x.count(0) > 2).sum()))
