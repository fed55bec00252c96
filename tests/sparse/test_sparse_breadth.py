"""Operators that have a sparse form: same answers as on dense storage, without storing anything densely."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md


def tensor(shape: tuple[int, ...] = (4, 6), seed: int = 7, valid: float = 0.6) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < valid
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return md.masked_tensor(torch.where(mask, values, torch.nan), mask)


def stored(x: md.MaskedTensor, layout: torch.layout) -> md.MaskedTensor:
    blocks = {"blocksize": (2, 3)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return x.to_layout(layout, **blocks)


def plain(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


CONDITION = plain(4, 6) > 0
LABELS = torch.tensor([0, 5, 2, -100])

# What torch's database has no sample of (conformance asks the rest under P4), in one layout each.
CASES = {
    "where imputes": (torch.sparse_coo, lambda x, y: torch.where(CONDITION, x, 0.0)),
    "masked_select, sparse mask": (torch.sparse_csr, lambda x, y: x.masked_select(y > 0)),
    "x[i]": (torch.sparse_csr, lambda x, y: x[torch.tensor([3, -1, 0])]),
    "x[:, i]": (torch.sparse_csc, lambda x, y: x[:, torch.tensor([[3, 5], [0, 0]])]),
    "x[i, j]": (torch.sparse_bsr, lambda x, y: x[torch.tensor([3, 0]), torch.tensor([-1, 2])]),
    "x[m]": (torch.sparse_bsc, lambda x, y: x[CONDITION]),
    "index_select, masked index": (
        torch.sparse_coo,
        lambda x, y: x.index_select(0, md.masked_tensor(torch.tensor([3, 99, 0]), torch.tensor([True, False, True]))),
    ),
    "torch.masked.mean": (torch.sparse_bsr, lambda x, y: torch.masked.mean(x, 1, mask=CONDITION)),
}


@pytest.mark.parametrize(("layout", "function"), CASES.values(), ids=CASES)
def test_values_masks_and_gradients_as_on_dense_storage(layout, function):
    results, gradients = [], []
    for make in (lambda t: t, lambda t: stored(t, layout)):
        x, y = make(tensor()).requires_grad_(), make(tensor(seed=8)).requires_grad_()
        with md.densify("never"):
            results.append(function(x, y))
        (results[-1] * torch.arange(1, results[-1].numel() + 1).reshape(results[-1].shape)).sum().backward()
        gradients.append((x.grad, y.grad))
    md.testing.assert_close(*results)
    for mine, theirs in zip(*gradients, strict=True):
        if mine is None or theirs is None:
            assert not any(g.to_tensor(0).any() for g in (mine, theirs) if g is not None)
        else:
            md.testing.assert_close(mine, theirs)


def test_an_index_out_of_range_is_torchs_error():
    x = tensor().to_sparse_csr()
    for call in (
        lambda: x.gather(1, torch.full((4, 6), 6)),
        lambda: x.take(torch.tensor([24])),
        lambda: x[torch.tensor([4])],
        lambda: x.index_add(0, torch.tensor([4]), tensor((1, 6))),
        lambda: F.nll_loss(x, torch.tensor([0, 6, 0, 0])),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            call()


def test_a_dense_branch_is_not_grown_beyond_what_is_there():
    x = tensor().to_sparse_csr()
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match="larger than any dense operand"):
        torch.where(torch.tensor([[True]] * 4), x, 0.0)
