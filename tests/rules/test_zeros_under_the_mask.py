"""Zeros under the mask: a number on which torch's own formulas decide, which no garbage is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import masked_dispatch as md


@pytest.mark.parametrize("rows", [True, False])
def test_a_hidden_zero_does_not_choose_the_derivative_of_a_product(rows: bool) -> None:
    """torch's derivative of prod has one formula for tensors without a zero, and another, rounded otherwise."""
    data = torch.rand(5, 7, dtype=torch.float64) + 0.5
    mask = torch.tensor([[True], [False], [True], [True], [False]])
    gradients = []
    for hidden in (1.0, 0.0):
        x = md.masked_tensor(torch.where(mask, data, hidden), mask if rows else mask.expand(5, 7), requires_grad=True)
        x.prod(1).to_tensor(1).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.to_tensor(0))
    assert torch.equal(*gradients)


def test_distances_without_a_common_coordinate_on_stored_invalid_elements() -> None:
    """NaN that is stored where it is invalid came back as the gradient of valid elements of other rows."""
    mask = torch.tensor([[True], [True], [False]])
    stored = md.masked_tensor(torch.tensor([[1.0], [4.0], [torch.nan]]), None).to_layout(torch.sparse_coo, sparse_dim=1)
    x = stored.mask_with(mask)
    x = x.detach().requires_grad_()
    F.pdist(x).sum().to_tensor(0).backward()
    assert x.grad is not None
    assert x.grad.to_tensor(0).flatten().tolist() == [-1, 1, 0]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["median", "var", "norm"])
def test_torch_masked_over_the_first_dimension_of_a_packed_batch(name: str, dim: int) -> None:
    """It is over the last one of a view of the batch, which stays packed."""
    dense = md.from_lengths(torch.arange(20.0).reshape(4, 5), torch.tensor([5, 3, 0, 4]))
    reduced = getattr(torch.masked, name)
    options = {"norm": {"ord": 2, "dim": dim}, "var": {"dim": dim, "unbiased": True}}.get(name, {"dim": dim})
    md.testing.assert_close(reduced(dense.to_packed(), **options), reduced(dense, **options), equal_nan=True)
