"""``x[:, a:-b] = v`` writes the part of each sample that ``x[:, a:-b]`` shows, in every storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError

LENGTHS = (5, 2, 3)
WHOLE = slice(None)
STORAGES = ("clone", "to_packed", "to_sparse", "to_sparse_csr")


def batch(side: str) -> tuple[md.MaskedTensor, list[Tensor]]:
    samples = [torch.arange(1.0, n + 1) + 10 * row for row, n in enumerate(LENGTHS)]
    data, there = torch.full((3, 5), torch.nan), torch.zeros(3, 5, dtype=torch.bool)
    for row, sample in enumerate(samples):
        first = {"right": 0, "left": 5 - len(sample), "centre": (5 - len(sample)) // 2}[side]
        data[row, first : first + len(sample)], there[row, first : first + len(sample)] = sample, True
    return md.padded(md.masked_tensor(data, there)), samples


def rows(x: md.MaskedTensor) -> list[list[float]]:
    dense = x.to_dense()
    return [row[there].tolist() for row, there in zip(dense.to_tensor(-1), dense.extent, strict=True)]


@pytest.mark.parametrize("part", [slice(None, -1), slice(1, None), slice(1, -1), slice(2, -2)])
@pytest.mark.parametrize("side", ["right", "left", "centre"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_write_ends_where_each_sample_does(storage: str, side: str, part: slice) -> None:
    x, samples = batch(side)
    for sample in samples:
        sample[part] = 0.0
    for index in ((WHOLE, part), (..., part), (torch.tensor([2, 0, 1]), part)):
        y: Any = getattr(x, storage)()
        y[index] = 0.0
        assert rows(y) == [sample.tolist() for sample in samples]
    one = getattr(x, storage)()
    one[0, part] = 0.0
    assert rows(one)[0] == samples[0].tolist()
    assert rows(one)[1:] == rows(x)[1:]


def test_a_padded_source_moves_each_samples_own() -> None:
    x, _ = batch("right")
    shifted = x.clone()
    shifted[:, :-1] = x[:, 1:]
    assert rows(shifted) == [[2, 3, 4, 5, 5], [12, 12], [22, 23, 23]]
    assert shifted.extent.equal(x.extent)


def test_gradients_go_where_values_went() -> None:
    x, _ = batch("right")
    x.requires_grad_()
    y, v = x * 1, torch.ones(3, 4, requires_grad=True)
    y[:, :-1] = v
    (y * 3).sum().backward()
    assert x.grad.to_tensor(0).tolist() == [[0, 0, 0, 0, 3], [0, 3, 0, 0, 0], [0, 0, 3, 0, 0]]
    assert v.grad.tolist() == [[3, 3, 3, 3], [3, 0, 0, 0], [3, 3, 0, 0]]


def test_what_cannot_end_there_is_refused() -> None:
    x, _ = batch("right")
    with pytest.raises(md.MaskedSemanticsError, match=r"Assign to the tensor itself, x\[:, a:-b\] = value"):
        x[:, :-1].add_(1)
    with pytest.raises(md.MaskedSemanticsError, match=r"bounds from the end .*write x\[:, a:-b\] = value"):
        torch.slice_scatter(x, torch.zeros(3, 4), 1, 0, -1)
    left, _ = batch("left")
    with pytest.raises(md.MaskedSemanticsError, match="counts from the start of the batch"):
        left.to_packed()[:, :2] = 0.0


@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like])
def test_the_inverse_of_an_order(make: Callable[[Tensor], Tensor]) -> None:
    there = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    x = md.padded(md.masked_tensor(torch.tensor([[5.0, 3, 4, 0], [9, 8, 0, 0]]), there))
    for batch in (x, x.flip(1).flip(1)):
        order = batch.argsort(1)
        inverse = make(order)
        inverse.scatter_(1, order, torch.arange(4).expand(2, 4))
        assert inverse.compressed().tolist() == [2, 0, 1, 1, 0]


LEFT = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]).bool()
WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scatter_": lambda inverse, order: inverse.scatter_(1, order, torch.arange(4).expand(2, 4)),
    "indices": lambda inverse, order: inverse.__setitem__((torch.arange(2)[:, None], order), torch.arange(4)),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_inverse_of_an_order_of_samples_that_begin_later(way: str) -> None:
    """Nobody has written the buffer, so its positions are those that the order names: none is lost."""
    left = md.padded(md.masked_tensor(torch.tensor([[0, 5.0, 3, 4], [0, 0, 9, 8]]), LEFT))
    order = left.argsort(1)
    inverse = torch.empty_like(order)
    WAYS[way](inverse, order)
    assert inverse.compressed().tolist() == [2, 0, 1, 1, 0]
    assert torch.equal(inverse.extent, LEFT)
    assert torch.equal(left.sort(1).values.gather(1, inverse).to_tensor(0.0), left.to_tensor(0.0))
    with pytest.raises(MaskedSemanticsError, match=r"names positions that the tensor does not have.*empty_like"):
        WAYS[way](torch.zeros_like(order), order)
    written = torch.empty_like(order)
    written[0, 0] = 5
    with pytest.raises(MaskedSemanticsError, match=r"names positions that the tensor does not have.*empty_like"):
        WAYS[way](written, order)


@pytest.mark.parametrize("way", WAYS)
def test_an_order_of_missing_values_names_no_position_for_them(way: str) -> None:
    hole = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]]).bool()
    order = md.padded(md.masked_tensor(torch.tensor([[0, 5.0, 3, 4], [0, 0, 9, 8]]), hole), LEFT).argsort(1)
    with pytest.raises(MaskedSemanticsError, match=r"names positions that the tensor does not have"):
        WAYS[way](torch.empty_like(order), order)
