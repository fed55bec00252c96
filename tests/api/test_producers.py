"""Producers: sparse results from dense tensors, by what qualifies; the rest is absent."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from few_elements import random_numbers as data
from op_registry.sparse import convert
from storages import LAYOUTS


def block_of(layout: torch.layout) -> dict:
    return {"blocksize": (2, 3)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}


def masked() -> md.MaskedTensor:
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(4)) < 0.6
    return md.masked_tensor(torch.where(mask, data(), torch.nan), mask)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_relu_keeps_what_is_above_zero(layout):
    x = data().requires_grad_()
    active = md.sparse_relu(x, layout, **block_of(layout))
    assert active.storage_layout is layout
    assert torch.equal(active.get_mask(), x > 0)
    assert torch.equal(active.to_tensor(0), x.relu())
    (active * active).sum().backward()
    assert type(x.grad) is Tensor
    assert torch.equal(x.grad, 2 * x.detach().relu())


def test_zero_is_not_above_the_threshold_and_nan_is_kept():
    x = torch.tensor([[0.0, -1.0, float("nan"), 2.0, 1.0]])
    assert md.sparse_relu(x).get_mask().tolist() == [[False, False, True, True, True]]
    assert md.sparse_threshold(x, 1).get_mask().tolist() == [[False, False, True, True, False]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("storage", [torch.strided, *LAYOUTS], ids=str)
def test_of_a_masked_tensor_what_is_valid_and_qualifies(storage, layout):
    x = masked().to_layout(storage, **block_of(storage)).requires_grad_()
    kept = md.sparse_where(x, data() > 0.1, layout=layout, **block_of(layout))
    expected = masked().mask_with(data() > 0.1)
    assert kept.storage_layout is layout
    assert torch.equal(kept.get_mask(), expected.get_mask())
    assert torch.equal(kept.to_tensor(0), expected.to_tensor(0))
    kept.square().sum().backward()
    assert torch.equal(x.grad.get_mask(), x.get_mask())
    assert torch.equal(x.grad.to_tensor(0), 2 * expected.to_tensor(0))


def test_only_what_is_kept_is_stored():
    kept = md.sparse_threshold(masked().to_sparse_csr(), 0.5)
    assert kept.nnz == int(kept.count())


def test_an_invalid_condition_does_not_hold():
    condition = md.masked_tensor(torch.tensor([[True, True]]), torch.tensor([[True, False]]))
    assert md.sparse_where(torch.ones(3, 2), condition).get_mask().tolist() == [[True, False]] * 3


@pytest.mark.parametrize("storage", [torch.strided, torch.sparse_csr, torch.sparse_bsr], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_keeps_places(storage, dim, largest):
    x = masked().to_layout(storage, **block_of(storage)).requires_grad_()
    top = md.sparse_topk(x, 2, dim, largest)
    worst = -torch.inf if largest else torch.inf
    filled = masked().to_tensor(worst)
    chosen = torch.zeros(4, 6, dtype=torch.bool).scatter(dim, filled.topk(2, dim, largest).indices, True)
    expected = masked().mask_with(chosen)
    assert top.storage_layout is torch.sparse_csr
    assert torch.equal(top.get_mask(), expected.get_mask())
    assert torch.equal(top.to_tensor(0), expected.to_tensor(0))
    top.square().sum().backward()
    assert torch.equal(x.grad.to_tensor(0), 2 * expected.to_tensor(0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_topk_of_a_plain_tensor(layout):
    x = data().requires_grad_()
    top = md.sparse_topk(x, 3, layout=layout, **block_of(layout))
    assert top.storage_layout is layout
    assert top.count(1).tolist() == [3] * 4
    top.sum().backward()
    assert torch.equal(x.grad, top.get_mask().to(x.dtype))


def test_a_comparison_made_sparse():
    x = data()
    holds = x > 1
    sparse = md.sparse_where(holds, holds)
    assert sparse.dtype is torch.bool
    assert sparse.nnz == int(holds.sum())
    assert torch.equal(sparse.to_tensor(False), holds)


def test_rows_that_stay_dense():
    x = data((4, 6, 3))
    rows = md.sparse_where(x, x[..., :1] > 0, layout=torch.sparse_coo, sparse_dim=2)
    assert rows.nnz == int((x[..., 0] > 0).sum())
    assert torch.equal(rows.get_mask(), (x[..., :1] > 0).expand(4, 6, 3))


def test_a_large_tensor_is_taken_chunk_by_chunk(monkeypatch):
    taken = []
    parts = convert.sparse_parts
    monkeypatch.setattr("op_registry.sparse.convert.sparse_parts", lambda *a: taken.append(a[0].shape) or parts(*a))
    x = torch.randn(512, 512)
    assert torch.equal(md.sparse_relu(x).to_tensor(0), x.relu())
    assert taken == [(512, 512)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: md.sparse_where(x, x), TypeError, "sparse_where takes a bool condition, and this one is"),
        (lambda x: md.sparse_where(x, torch.ones(5, dtype=torch.bool)), RuntimeError, "expand|broadcast|size"),
        (lambda x: md.sparse_relu(x, torch.sparse_bsr), ValueError, re.escape("needs a blocksize (rows, columns)")),
        (lambda x: md.sparse_relu(x[0], torch.sparse_csr), ValueError, "has at least 2 sparse dimensions"),
        (lambda x: md.sparse_topk(x, 7), RuntimeError, "selected index k out of range"),
        (lambda x: md.sparse_topk(x, 1, 5), IndexError, "dim=5 is out of range"),
    ],
)
def test_what_does_not_fit_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call(data())
