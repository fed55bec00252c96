"""Tensors of shapes that no machine could store densely take memory for what is stored alone; long rows by chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import masked_dispatch as md
from masked_dispatch.testing import assert_close as same
from op_registry.sparse.segments import IDENTITY, LONG, RowChunks

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


@pytest.mark.parametrize(("name", "dense_dims"), zip(ALONG_ROWS, itertools.cycle([0, 1]), strict=False))
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


@pytest.mark.parametrize(("kept", "dense_dims"), [("rows", 0), ("rows", 1), ("columns", 1), ("one for all", 0)])
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


# --------------------------------------------------------------------------- more bytes than int64 can number

SIDE = 2**31  # squared, four quintillion elements: torch refuses a strided tensor of so many numbers


def square() -> md.MaskedTensor:
    """(SIDE, SIDE), with 1 at its first element, 2 in its middle, and 3 at its last."""
    indices = torch.tensor([[0, SIDE // 2, SIDE - 1]]).expand(2, 3)
    stored = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0, 2.0, 3.0]), (SIDE, SIDE), is_coalesced=True, check_invariants=False
    )
    return md.as_masked_tensor(stored)


END = SIDE - 1
BOTH = torch.tensor([END, 0])
# Each with the valid elements of its result, by their coordinates.
SELECTIONS: dict[str, tuple[Callable[[Tensor], Tensor], dict[tuple[int, ...], float]]] = {
    "x[n-1, m-1]": (lambda x: x[END, END], {(): 3}),
    "x[-1, -1]": (lambda x: x[-1, -1], {(): 3}),
    "x[0, 1]": (lambda x: x[0, 1], {}),
    "x[n-1]": (lambda x: x[END], {(END,): 3}),
    "select": (lambda x: x.select(1, 0), {(0,): 1}),
    "x[n-2:, 1:]": (lambda x: x[END - 1 :, 1:], {(1, END - 1): 3}),
    "narrow": (lambda x: x.narrow(0, END - 1, 2).narrow(1, END - 1, 2), {(1, 1): 3}),
    "index_select": (lambda x: x.index_select(0, BOTH), {(0, END): 3, (1, 0): 1}),
    "x[index]": (lambda x: x[BOTH], {(0, END): 3, (1, 0): 1}),
    "x[index, index]": (lambda x: x[BOTH, BOTH], {(0,): 3, (1,): 1}),
    "gather": (lambda x: x.gather(1, torch.tensor([[0], [1]])), {(0, 0): 1}),
    "x[mask]": (lambda x: x[x > 1], {(0,): 2, (1,): 3}),
    "chunk": (lambda x: x.chunk(2)[1][1:], {(END // 2 - 1, END): 3}),
    "split": (lambda x: x.split(SIDE // 2, 1)[0][0], {(0,): 1}),
    "flip": (lambda x: x.flip(0, 1)[0], {(0,): 3}),
    "transpose": (lambda x: x.narrow(1, END, 1).t(), {(0, END): 3}),
    "permute": (lambda x: x.permute(1, 0)[END], {(END,): 3}),
    "diagonal": (lambda x: x.diagonal()[END:], {(0,): 3}),
    "expand": (lambda x: x.expand(1, SIDE, SIDE)[0, END, END:], {(0,): 3}),
    "unsqueeze": (lambda x: x.unsqueeze(0)[0, 0], {(0,): 1}),
    "roll": (lambda x: x.roll(1, 0)[0], {(END,): 3}),
    "sum": (lambda x: x.sum(), {(): 6}),
    "trace": (lambda x: x.trace(), {(): 6}),
    "select_scatter": (lambda x: x.select_scatter(x[0], 0, END)[END], {(0,): 1}),
    "slice_scatter": (lambda x: x.slice_scatter(x[:1], 0, END)[END], {(0,): 1}),
    "diagonal_scatter": (lambda x: x.diagonal_scatter(x[0])[0], {(0,): 1}),
    "masked.sum": (lambda x: torch.masked.sum(x, (0, 1)), {(): 6}),
    "sparse_where": (lambda x: md.sparse_where(x, x > 1)[END], {(END,): 3}),
    "sparse_relu": (lambda x: md.sparse_relu(-x)[END], {}),
    "accumulate": (lambda x: md.accumulate(x, x)[END], {(END,): 6}),
}


def valid_elements(x: Tensor) -> dict[tuple[int, ...], float]:
    assert isinstance(x, md.MaskedTensor)
    if not x.ndim:
        return {(): float(x)} if x.get_mask() else {}
    return dict(zip(map(tuple, x.nonzero().tolist()), x.compressed().tolist(), strict=True))


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_from_more_bytes_than_int64_can_number(name: str) -> None:
    select, expected = SELECTIONS[name]
    assert valid_elements(select(square())) == expected


def test_counts_of_more_bytes_than_int64_can_number() -> None:
    assert int(square().count_nonzero()) == 3
    assert int(square().count()) == 3


def test_writes_to_more_bytes_than_int64_can_number() -> None:
    x = square()
    x[END, END], x[END, 0] = 5.0, 7.0
    assert valid_elements(x[END]) == {(0,): 7, (END,): 5}


def test_a_permuted_one_is_checked_without_its_bytes() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        square().permute(0, 5)
    with pytest.raises(IndexError, match="index 2147483648 out of range"):
        square().select(0, SIDE)


def beyond_int64_bytes(*sizes: int) -> md.MaskedTensor:
    """float64 of 2⁶² elements, which in dense storage would be 2⁶⁵ bytes; two are stored, at the beginning."""
    indices = torch.tensor([[0, 1]] * len(sizes))
    values = torch.tensor([3.0, 4.0], dtype=torch.float64)
    return md.as_masked_tensor(
        torch.sparse_coo_tensor(indices, values, sizes, is_coalesced=True, check_invariants=True)
    )


OF_ANY_SIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": lambda x: F.glu(x),
    "glu of rows": lambda x: F.glu(x, 0),
    "negative padding": lambda x: F.pad(x, (0, -2)),
    "negative padding of rows": lambda x: F.pad(x, (0, 0, -1, -3)),
    "renorm of rows": lambda x: x.renorm(2, 0, 1.0),
    "renorm of columns": lambda x: x.renorm(2, 1, 1.0),
    "a row by None": lambda x: x[None, 0],
    "a slice": lambda x: x[1:, :-1],
    "flip": lambda x: x.flip(1).flip(1),
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_more_bytes_than_int64_numbers(name: str) -> None:
    function, x = OF_ANY_SIZE[name], beyond_int64_bytes(2**40, 2**22)
    with md.densify("never"):
        result, wanted = function(x), function(beyond_int64_bytes(8, 8).to_dense())
    for d, size in enumerate(wanted.shape):
        result = result.narrow(d, 0, size)
    same(result.to_dense(), wanted)


def test_a_row_is_assigned_where_bytes_are_more_than_int64_numbers() -> None:
    x = beyond_int64_bytes(2**40, 2**22)
    x[None, 0] = md.as_masked_tensor(torch.arange(2.0**22), torch.arange(2**22) < 3)
    assert x.nnz == 4
    assert x.sum() == 3 + 4


def test_complex_numbers_where_bytes_are_more_than_int64_numbers() -> None:
    z = torch.view_as_complex(beyond_int64_bytes(2**40, 2**21, 2))
    assert z.shape == (2**40, 2**21)
    assert torch.view_as_real(z).shape == (2**40, 2**21, 2)


@pytest.mark.parametrize("dense", [lambda x: x.to_dense(), lambda x: x.to_tensor(0)])
def test_dense_storage_of_more_bytes_than_int64_numbers_is_refused(dense: Callable[[md.MaskedTensor], Tensor]) -> None:
    sizes = r"shape \(1099511627776, 4194304\) and dtype torch.float64 would have 36,893,488,147,419,103,232 bytes"
    with pytest.raises(md.MaskedSemanticsError, match=sizes + ".* Work on what is stored"):
        dense(beyond_int64_bytes(2**40, 2**22))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_parts_of_complex_numbers_of_a_permuted_tensor_stay_sparse(order: tuple[int, ...]) -> None:
    mask = torch.tensor([True, False, True, True, False]).repeat(12)[:48].reshape(2, 4, 6)
    x = md.masked_tensor(torch.arange(48.0).reshape(2, 4, 6), mask)
    z = torch.complex(x, -x)
    for storage in (z.to_sparse(), z.to_sparse(sparse_dim=1), z.to_sparse(sparse_dim=2), z.to_packed()):
        turned, wanted = storage.permute(order), z.permute(order)
        with md.densify("never"):
            parts = torch.view_as_real(turned)
            whole = torch.view_as_complex(parts)
        same(parts, torch.view_as_real(wanted), rtol=0, atol=0)
        same(whole, wanted, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------- long rows


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
    found = []
    for x in (dense, sparse):
        leaf = x.detach().clone().requires_grad_()
        result = getattr(leaf, word)(1)
        result.square().sum().to_tensor(0).backward()
        found.append((result, leaf.grad))
    same(*found, rtol=1e-4, atol=1e-5)
