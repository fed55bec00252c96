"""first, last, align and positions count within each sample, wherever its positions lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import masked_dispatch as md

LENGTHS = [4, 2, 0, 1]
WIDTH = 6
# Which indices of the batch a sample of n positions has.
PLACES: dict[str, Callable[[int], range]] = {
    "right": lambda n: range(n),
    "left": lambda n: range(WIDTH - n, WIDTH),
    "centre": lambda n: range((WIDTH - n) // 2, (WIDTH - n) // 2 + n),
    "gaps": lambda n: range(0, n + 2, 2) if n == 2 else range(WIDTH - n, WIDTH),
}


def batch(side: str, missing: bool = False) -> tuple[md.MaskedTensor, list[Tensor]]:
    """A batch (B, T, 2) with NaN as padding, and its samples (n, 2), plain, or masked where one element is missing."""
    samples = [torch.arange(2.0 * n, dtype=torch.float64).view(n, 2) + 10 * row for row, n in enumerate(LENGTHS)]
    data = torch.full((len(LENGTHS), WIDTH, 2), torch.nan, dtype=torch.float64)
    there = torch.zeros(len(LENGTHS), WIDTH, 1, dtype=torch.bool)
    for row, sample in enumerate(samples):
        for index, position in zip(PLACES[side](len(sample)), sample, strict=False):
            data[row, index], there[row, index] = position, True
    mask = there.expand(data.shape)
    if missing:
        mask = mask & (data != 2)
        samples = [md.as_masked_tensor(sample, sample != 2) for sample in samples]
    return md.padded(md.masked_tensor(data, mask), there, dim=1), samples


def check(found: md.MaskedTensor, expected: list[Tensor]) -> None:
    """Row i of a batch is `expected[i]`: its first positions are there, and no others."""
    assert found.extent is not None
    for row, sample in enumerate(expected):
        n = len(sample)
        assert found.extent[row].all(-1).tolist() == [True] * n + [False] * (found.shape[1] - n)
        md.testing.assert_close(found.without_extent()[row, :n], sample)
        assert not found.get_mask()[row, n:].any()


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("side", PLACES)
def test_ends_are_each_samples_own(side: str, missing: bool) -> None:
    x, samples = batch(side, missing)
    for k in (0, 1, 3, 9):
        first, last = md.first(x, 1, k), md.last(x, 1, k)
        assert first.shape == last.shape == (4, min(k, WIDTH), 2)
        check(first, [sample[:k] for sample in samples])
        check(last, [sample[max(len(sample) - k, 0) :] for sample in samples])
    check(md.align(x), samples)


@pytest.mark.parametrize("side", PLACES)
def test_one_position_has_no_dimension(side: str) -> None:
    x, samples = batch(side)
    for found, index in ((md.first(x), 0), (md.last(x), -1)):
        assert found.shape == (4, 2)
        assert found.extent.tolist() == [[True, True], [True, True], [False, False], [True, True]]
        for row, sample in enumerate(samples):
            if len(sample):
                assert found[row].tolist() == sample[index].tolist()
        assert found.get_mask().equal(found.extent)
    # What is joined to a sample that is not there stays invalid.
    joined = torch.cat([md.last(x), torch.ones(4, 1, dtype=torch.float64)], 1)
    found = F.linear(joined, torch.ones(1, 3, dtype=torch.float64))
    assert found.get_mask()[:, 0].tolist() == [True, True, False, True]


@pytest.mark.parametrize("side", PLACES)
def test_gradients_go_to_the_positions_that_are_read(side: str) -> None:
    x, _ = batch(side)
    for found in (md.last(x.requires_grad_()), md.last(x, 1, 1), md.align(x)[:, :1], md.first(x, k=1)):
        x.grad = None
        found.square().sum().backward()
        gradient = x.grad.to_tensor(0)
        assert gradient.count_nonzero(1).amax(1).tolist() == [1, 1, 0, 1]
        rows = torch.tensor([0, 1, 3])
        first_or_last = found.detach().squeeze(1) if found.ndim == 3 else found.detach()
        torch.testing.assert_close(gradient.sum(1)[rows], 2 * first_or_last.to_tensor(0)[rows])


def test_a_batch_that_is_only_padded_stays_so_and_an_aligned_one_is_itself() -> None:
    right, left = (md.padded(batch(side)[0].without_extent(), dim=1) for side in ("right", "left"))
    assert md.align(right) is right
    for found in (md.align(left), md.last(right), md.first(left, k=2)):
        assert found._extent.is_mask
    aligned = md.align(left)
    md.testing.assert_close((aligned + right).without_extent(), (right + right).without_extent())
    assert aligned[:, ::2].extent[..., 0].sum(1).tolist() == [2, 1, 0, 1]  # what left refuses


@pytest.mark.parametrize("side", PLACES)
def test_positions_count_within_each_sample(side: str) -> None:
    x, _ = batch(side)
    found = md.positions(x)
    assert found.dtype is torch.int64
    assert found.shape == (4, WIDTH)
    assert [row.compressed().tolist() for row in found] == [list(range(n)) for n in LENGTHS]
    assert found.extent.equal(x.extent[..., 0])
    table = torch.arange(2.0 * WIDTH, dtype=torch.float64).view(WIDTH, 2)
    y = x + table[found]
    assert y.extent.equal(x.extent)
    md.testing.assert_close(md.align(y), md.align(x) + F.embedding(md.positions(md.align(x)), table))


def test_positions_of_other_dimensions() -> None:
    x, _ = batch("left")
    heads = x.unflatten(2, (2, 1)).permute(0, 2, 3, 1)  # (B, heads, 1, T)
    assert md.positions(heads, -1).equal(md.positions(x))
    check(md.align(heads, 3).permute(0, 3, 1, 2).flatten(2), batch("right")[1])


def test_two_dimensions_of_positions() -> None:
    there = torch.tensor([[True, True], [False, True]])
    x = md.padded(torch.arange(8.0).view(2, 2, 2), there[:, :, None] & there[:, None])
    assert md.last(x, 1).compressed().tolist() == [2, 3, 7]
    assert md.last(md.last(x, 1), 1).tolist() == [3, 7]
    assert md.positions(x, 2).shape == (2, 2)


@pytest.mark.parametrize("function", [md.first, md.last, md.align, md.positions])
def test_what_has_no_positions_is_refused(function: Callable[..., Tensor]) -> None:
    name, (x, _) = function.__name__, batch("right")
    with pytest.raises(ValueError, match=rf"{name}: dimension 2 .*numbers no positions of its samples; these do: 1"):
        function(x, 2)
    with pytest.raises(ValueError, match=r"dimension 0 of a tensor of shape \(4, 2\) numbers no .*; these do: none"):
        function(md.last(x), 0)
    with pytest.raises(IndexError, match=rf"{name}: dim=3 is out of range for a tensor of shape \(4, 6, 2\)"):
        function(x, 3)
    with pytest.raises(ValueError, match=rf"{name}: dimension 0 .*is merged of positions and others; split it first"):
        function(x.flatten(0, 1), 0)


def test_without_an_extent_a_tensor_is_there_everywhere() -> None:
    plain = torch.arange(6.0).view(2, 3)
    masked = md.masked_tensor(plain, plain != 5)
    for x in (plain, masked, masked.to_sparse()):
        assert type(md.last(x)) is type(x)
        md.testing.assert_close(md.first(x), x[:, 0])
        md.testing.assert_close(md.last(x), x[:, -1])
        md.testing.assert_close(md.last(x, 1, 2), x[:, -2:])
        md.testing.assert_close(md.last(x, 0, 9), x)
        assert md.align(x) is x
        assert md.positions(x).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert md.positions(plain, 0).tolist() == [0, 1]


def test_in_a_graph_of_what_it_computed() -> None:
    def ends(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [md.first(y), md.last(y), md.last(y, 1, 2), md.align(y), md.positions(y)]

    torch._dynamo.reset()
    x, _ = batch("left")
    compiled = torch.compile(ends, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(x), ends(x), strict=True):
        md.testing.assert_close(found, expected, check_extent=True)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="last takes a number of positions, k >= 0, not -1"):
        md.last(batch("right")[0], k=-1)


def test_padding_of_a_sample_without_rows_adds_none() -> None:
    x = torch.ones(1, 2, 1, 1)
    nothing = md.padded(md.masked_tensor(x, torch.zeros_like(x).bool()), dim=(2, 3))
    assert not F.pad(nothing, (0, 2), value=0.3).extent.any()


@pytest.mark.parametrize("function", [md.first, md.last])
@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 3)])
def test_a_batch_of_samples_without_positions(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    data = torch.ones(shape, requires_grad=True)
    padded = md.from_lengths(data, torch.tensor([0, 0]))
    own = md.padded(padded.without_extent(), torch.ones(shape, dtype=torch.bool), dim=1)
    for x in (padded, own, padded.to_packed(), padded.to_sparse()):
        found = function(x)
        assert found.shape == (2, *shape[2:])
        assert found.count() == 0
        assert not found.extent.any()
        assert function(x, 1, 2).shape == shape
    function(padded).sum().backward()
    assert data.grad is not None
    for alone in (data, padded.without_extent()):
        with pytest.raises(IndexError, match=rf"{function.__name__}: a tensor of shape .* has no position along"):
            function(alone)


def test_narrow_counts_a_negative_start_from_the_end() -> None:
    x = md.padded(md.masked_tensor(torch.tensor([[1.0, 2, 3], [0, 0, 7]]), torch.tensor([[1, 1, 1], [0, 0, 1]]).bool()))
    for shown in (x.narrow(1, -1, 1), torch.narrow_copy(x, 1, -1, 1), x.to_packed().narrow(1, -1, 1)):
        assert shown.to_tensor(0).tolist() == [[3], [7]]
    with pytest.warns(md.BatchEndWarning):
        md.from_lengths(torch.ones(2, 3), torch.tensor([3, 1])).narrow(1, -1, 1)
    stored = md.masked_tensor(torch.tensor([[1.0, 2, 3]]), torch.tensor([[True, False, True]])).to_sparse_csr()
    assert stored.narrow(1, -1, 1).to_tensor(0).tolist() == [[3]]
