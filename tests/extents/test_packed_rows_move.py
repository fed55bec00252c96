"""Padded batches in every storage: values, masks and extents are those of the dense call; packed rows that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from comparison import same_extents as same
from loops_over_samples import batch
from masked_dispatch import MaskedSemanticsError

STORED = {
    "packed": lambda x: x.to_packed(),
    "coo": lambda x: x.to_sparse(),
    "coo of rows": lambda x: x.to_sparse(2),
    "csr": lambda x: x.to_sparse_csr(dense_dim=1),
    "csc": lambda x: x.to_sparse_csc(dense_dim=1),
    "bsr": lambda x: x.to_sparse_bsr((2, 1), dense_dim=1),
}
FEW = {name: STORED[name] for name in ("packed", "coo", "csr")}


def missing(side: str = "right") -> md.MaskedTensor:
    """A batch of which a row, and a feature of another, are missing."""
    x, _ = batch(2, side=side)
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[:, 1] = False
    mask[0, 2, 1] = False
    return x.mask_with(mask)


@pytest.mark.parametrize("storage", STORED)
def test_conversions_keep_it(storage: str) -> None:
    for x in (batch(2)[0], batch(2, side="left")[0], missing()):
        stored = STORED[storage](x)
        same(stored, x)
        same(stored.to_packed(), x)
        same(stored.to_sparse().to_packed().to_sparse_csr(dense_dim=1), x)
        assert stored.detach().extent.tolist() == x.extent.tolist()
        assert stored.without_extent().extent is None
        assert stored.without_extent().storage_layout == stored.storage_layout


def test_packed_storage_stores_the_positions_that_are_there() -> None:
    x, _ = batch(2)
    assert x.to_packed().nnz == 9
    assert missing().to_packed().nnz == 9
    assert missing().without_extent().to_packed().nnz == 6
    assert missing().to_sparse().to_packed().nnz == 9
    assert missing().to_packed().count(2).tolist()[0] == [2, 0, 1, 2, 0]


@pytest.mark.parametrize("storage", STORED)
def test_each_samples_own_ends(storage: str) -> None:
    for x in (batch(2)[0], batch(2, side="left")[0], missing("left")):
        stored = STORED[storage](x)
        same(md.last(stored), md.last(x))
        same(md.first(stored, k=2), md.first(x, k=2))
        same(md.align(stored), md.align(x))
        same(md.positions(stored), md.positions(x))


@pytest.mark.parametrize("storage", STORED)
def test_masks_by_hand(storage: str) -> None:
    x = batch(2)[0]
    stored, other = STORED[storage](x), missing()
    plain = torch.tensor([True, False, True, True, False])[:, None]
    same(stored.mask_with(plain), x.mask_with(plain))
    same(stored.mask_like(other), x.mask_like(other))
    same(stored.mask_like(STORED[storage](other)), x.mask_like(other))
    same(md.accumulate(stored, STORED[storage](other)), md.accumulate(x, other))
    same(md.accumulate(stored, other), md.accumulate(x, other))
    same(md.sparse_where(stored, stored > 0), md.sparse_where(x, x > 0).to_dense())
    same(md.padded(stored.without_extent(), dim=1), x)
    same(md.padded(stored.without_extent(), x.extent, dim=1), x)


@pytest.mark.parametrize("storage", FEW)
def test_assignments_make_no_position_be_there(storage: str) -> None:
    def written(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1] = 5.0
        x.copy_(torch.ones_like(x.get_data()) * x)
        return x

    for x in (batch(2)[0], missing()):
        same(written(STORED[storage](x)), written(x))
        same(STORED[storage](x).clone().copy_(torch.ones(x.shape, dtype=x.dtype)), x.clone().fill_(1.0))


def test_layouts_that_meet_are_refused() -> None:
    right, left = batch(2)[0].to_packed(), batch(2, side="left")[0].to_packed()
    with pytest.raises(MaskedSemanticsError, match=r"add: `self` and `other` have samples at different places"):
        right + left


def test_what_does_not_carry_it_refuses() -> None:
    x = batch(2)[0].to_packed()
    with pytest.raises(MaskedSemanticsError, match="extent has no sparse form"), md.densify("never"):
        _ = x.extent


def test_packing_says_that_its_rows_are_what_is_there() -> None:
    x = batch(2, side="left")[0].without_extent()
    same(x.to_packed(), batch(2, side="left")[0])
    assert x.to_packed()._extent.known == batch(2, side="left")[0]._extent.known
    gaps = x.mask_with(torch.tensor([[True], [False], [True], [True], [True]])).to_packed()
    assert gaps.extent[0, :, 0].tolist() == [False, False, True, True, True]
    assert x.to_sparse().extent is None
    assert x.to_packed().without_extent().to_packed().extent is not None


# ---------------------------------------------------------------------------------------------- packed rows that move


MOVES: dict[str, Callable[[Any], Tensor]] = {
    "last": lambda x: md.last(x),
    "last two": lambda x: md.last(x, 1, 2),
    "more than there are": lambda x: md.last(x, 1, 9),
    "first": lambda x: md.first(x),
    "first two": lambda x: md.first(x, 1, 2),
    "flip of samples too": lambda x: x.flip((0, 1)),
    "roll": lambda x: x.roll((1, 1), (1, 0)),
    "positions chosen": lambda x: x[:, torch.tensor([2, 0])],
    "flip of heads": lambda x: x.unflatten(2, (2, 1)).transpose(1, 2).flip(2),
    "features joined": lambda x: torch.cat([x, 2 * x], -1),
    "features split": lambda x: x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("name", MOVES)
def test_packed_rows_move(name: str) -> None:
    data = torch.randn(3, 4, 2, dtype=torch.float64)
    padded = md.from_lengths(data, torch.tensor([4, 0, 3])).requires_grad_()
    packed = padded.detach().to_packed().requires_grad_()
    with md.densify("never"):
        found = MOVES[name](packed)
    expected = MOVES[name](padded)
    same(found.to_dense(), expected)
    assert found._extent.known == expected._extent.known
    assert found._extent.is_mask
    found.square().sum().backward()
    expected.square().sum().backward()
    same(packed.grad.to_dense(), padded.grad)


def test_parts_that_know_the_same_keep_their_rows_valid_without_a_mask() -> None:
    x = md.from_lengths(torch.randn(3, 4, 2), torch.tensor([4, 0, 3])).to_packed()
    for y in (torch.cat([x, 2 * x], -1), x.chunk(2, -1)[0], torch.stack([x, x.exp()], -1)):
        assert y.storage_layout is torch.jagged
        assert y._kept_validity is None
