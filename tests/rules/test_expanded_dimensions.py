"""Dimensions of stride 0, which torch's own median misreads."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

import masked_dispatch as md

aten = torch.ops.aten


@pytest.mark.parametrize("name", ["median", "nanmedian"])
@pytest.mark.parametrize("valid", ["no mask", "all", "rows", "some"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_median_of_an_expanded_dimension(name: str, valid: str, dim: int) -> None:
    """Torch's kernel reads beyond its copy of the slice."""
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).unsqueeze(dim)
    rows = torch.tensor([True, False, True, True])[:, None].expand(4, 6).unsqueeze(dim)
    some = torch.rand(data.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask = {"no mask": None, "all": torch.ones_like(rows), "rows": rows, "some": some}[valid]
    x = md.masked_tensor(data, mask) if mask is not None else md.as_masked_tensor(data)
    sizes = [-1] * 3
    sizes[dim] = 5
    assert x.expand(sizes).stride(dim) == 0
    found, index = getattr(x.expand(sizes), name)(dim)
    torch.testing.assert_close(found.to_tensor(0), x.squeeze(dim).to_tensor(0), rtol=0, atol=0)
    assert ((index.to_tensor(0) >= 0) & (index.to_tensor(0) < 5)).all()


@pytest.mark.parametrize("op", [aten.median.dim, aten.nanmedian.dim])
def test_torch_still_misreads_an_expanded_dimension(op: OpOverload) -> None:
    """Once this fails, `own_memory` of the median's rule and `misread` of the fuzzer can go."""
    x = torch.arange(12.0).reshape(3, 4).expand(5, 3, 4)
    assert not torch.equal(op(x, 0)[0], x[0])
