"""Sums and extrema of long rows by chunks: what each row says by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masked_dispatch as md
from op_registry.sparse.segments import IDENTITY, LONG, RowChunks


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(["sum", "amax", "amin"]),
)
def test_every_row_is_reduced_by_itself(lengths, width, word):
    stored = sum(lengths)
    if stored < width:
        return  # not a whole chunk: never asked for
    values = torch.randn(stored, dtype=torch.float64, generator=torch.Generator().manual_seed(stored))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = values.split(lengths)
    expected = [getattr(row, word)() if len(row) else torch.tensor(IDENTITY[word], dtype=row.dtype) for row in rows]
    torch.testing.assert_close(RowChunks(ends, stored, width, values.dtype).reduce(values, word), torch.stack(expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_sees_nothing_of_its_neighbours(bad):
    values = torch.ones(100, dtype=torch.float64)
    values[37:61] = bad
    chunks = RowChunks(torch.tensor([0, 37, 61, 100]), 100, 16, values.dtype)
    assert chunks.reduce(values, "sum")[[0, 2]].tolist() == [37, 39]
    assert chunks.reduce(values, "amax")[[0, 2]].tolist() == [1, 1]
    assert chunks.reduce(values, "amin")[[0, 2]].tolist() == [1, 1]


@pytest.mark.parametrize("word", ["sum", "amax", "amin", "mean", "softmax"])
def test_long_rows_are_reduced_as_dense_ones(word):
    generator = torch.Generator().manual_seed(0)
    shape = (40, 12 * LONG)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[3] = False
    dense = md.masked_tensor(torch.where(mask, torch.randn(shape, generator=generator), torch.nan), mask)
    sparse = dense.to_sparse_csr()
    assert sparse.nnz >= max(2**14, LONG * 40)
    results, gradients = [], []
    for x in (dense, sparse):
        leaf = x.detach().clone().requires_grad_()
        result = getattr(leaf, word)(1)
        result.square().sum().to_tensor(0).backward()
        results.append(result.to_dense())
        gradients.append(leaf.grad.to_dense())
    for mine, theirs in (results, gradients):
        assert torch.equal(mine.get_mask(), theirs.get_mask())
        torch.testing.assert_close(mine.to_tensor(0), theirs.to_tensor(0), rtol=1e-4, atol=1e-5)
