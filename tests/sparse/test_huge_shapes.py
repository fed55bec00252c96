"""Tensors of shapes that no machine could store densely: what works on them takes memory for what is stored alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md

ROWS = 2**50  # a byte for each row is a petabyte
LAST = ROWS - 1


def huge(dense_dims: int = 0) -> md.MaskedTensor:
    """(ROWS, 4), or (ROWS, 4, 3) with a dense dimension; five elements in three rows, of which the last is one."""
    indices = torch.tensor([[0, 0, 7, LAST, LAST], [0, 3, 1, 0, 2]])
    values = torch.tensor([1.0, 2.0, 3.0, 5.0, 4.0])
    if dense_dims:
        values = torch.stack([values, -values, values * 2], 1)
    sizes = (ROWS, 4, *([3] * dense_dims))
    stored = torch.sparse_coo_tensor(indices, values, sizes, is_coalesced=True, check_invariants=False)
    return md.as_masked_tensor(stored)


def small(x: md.MaskedTensor) -> md.MaskedTensor:
    """The three rows of such a tensor, stored densely."""
    return torch.stack([x[0], x[7], x[LAST]]).to_dense()


# What has a result for each element of a row, or the first ones of it in order.
ALONG_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "softmin": lambda x: F.softmin(x, 1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "sort": lambda x: x.sort(1).values,
    "argsort": lambda x: x.argsort(1, descending=True),
    "topk": lambda x: x.topk(2, 1).values,
    "sparse_topk": lambda x: md.sparse_topk(x, 1, 1),
    "the least by sparse_topk": lambda x: md.sparse_topk(x, 1, 1, largest=False, layout=torch.sparse_coo),
}


def same(mine: Tensor, theirs: Tensor) -> None:
    assert isinstance(mine, md.MaskedTensor)
    assert isinstance(theirs, md.MaskedTensor)
    assert torch.equal(mine.get_mask(), theirs.get_mask())
    torch.testing.assert_close(mine.to_tensor(0), theirs.to_tensor(0))


@pytest.mark.parametrize("dense_dims", [0, 1])
@pytest.mark.parametrize("name", ALONG_ROWS)
def test_rows_one_by_one(name: str, dense_dims: int) -> None:
    function, x = ALONG_ROWS[name], huge(dense_dims)
    with md.densify("never"):
        result = function(x)
    assert result.shape[0] == ROWS
    same(small(result), function(small(x)).to_dense())


@pytest.mark.parametrize("name", ["softmax", "cumsum", "log_softmax", "sort", "topk"])
def test_gradients(name: str) -> None:
    function = ALONG_ROWS[name]
    weights = torch.arange(1.0, 5.0)
    x = huge().requires_grad_()
    y = small(huge()).detach().requires_grad_()
    for t in (x, y):
        result = function(t)
        (result * weights[: result.shape[1]]).sum().backward()
    same(small(x.grad), y.grad)


@pytest.mark.parametrize("dense_dims", [0, 1])
@pytest.mark.parametrize("kept", ["rows", "columns", "one for all"])
def test_a_mask_that_is_expanded(kept: str, dense_dims: int) -> None:
    x = huge(dense_dims)
    row = torch.tensor([True, False, True, True]).reshape(4, *[1] * dense_dims)
    mask = {"rows": row, "columns": torch.tensor(False), "one for all": torch.tensor(True)}[kept]
    masked = x.mask_with(mask.expand(x.shape))
    same(small(masked), small(x).mask_with(mask.expand(3, *x.shape[1:])))


def test_a_mask_is_copied() -> None:
    """However it is seen: a write to the caller's mask reaches nobody."""
    x = md.masked_tensor(torch.ones(3, 2), torch.tensor([[True, True], [False, False], [True, True]])).to_sparse(1)
    mask = torch.ones(1, 2, dtype=torch.bool)
    masked = x.mask_with(mask.expand(3, 2))
    mask.zero_()
    assert int(masked.count()) == 4


def test_what_is_kept_is_stored_as_it_was() -> None:
    assert md.sparse_topk(huge(), 1).storage_layout is torch.sparse_coo
    assert md.sparse_relu(huge()).storage_layout is torch.sparse_coo
    assert md.sparse_topk(small(huge()), 1).storage_layout is torch.sparse_csr
