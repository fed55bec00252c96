"""compressed() gives the valid elements in order, in every storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from sixteen_elements import MASK, F, T, sample
from storages import STORAGES


@pytest.mark.parametrize("layout", STORAGES)
def test_compressed_gives_the_valid_elements_in_order(layout: str) -> None:
    x = sample(layout).requires_grad_()
    found = x.compressed()
    assert type(found) is Tensor
    assert found.tolist() == torch.arange(16.0).reshape(4, 4)[MASK].tolist()
    (found * torch.arange(10.0)).sum().backward()
    assert isinstance(x.grad, md.MaskedTensor)
    assert torch.equal(x.grad.get_mask(), MASK)
    assert x.grad.to_tensor(0)[MASK].tolist() == list(range(10))


@pytest.mark.parametrize("mask", [None, torch.tensor([T, F, T, T]), torch.zeros(4, 4, dtype=torch.bool)])
def test_compressed_is_a_copy(mask: Tensor | None) -> None:
    data = torch.arange(16.0).reshape(4, 4).t()
    x = md.as_masked_tensor(data, mask)
    found = x.compressed()
    assert found.tolist() == data[torch.ones(4, 4, dtype=torch.bool) if mask is None else mask.expand(4, 4)].tolist()
    found.fill_(-1.0)
    assert data.min() >= 0
    assert md.masked_tensor(5.0).compressed().tolist() == [5.0]
