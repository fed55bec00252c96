"""Pieces: named ones, and those that are no views."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from op_registry import InvalidValueError, MaskedSemanticsError
from storages import LAYOUTS, MASK, state

NAMES = {
    torch.sparse_coo: ["indices"],
    torch.sparse_csr: ["crow_indices", "col_indices"],
    torch.sparse_csc: ["ccol_indices", "row_indices"],
    torch.sparse_bsr: ["crow_indices", "col_indices"],
    torch.sparse_bsc: ["ccol_indices", "row_indices"],
}


def sample(shape: tuple[int, ...], hidden: float = float("nan")) -> md.MaskedTensor:
    """A tensor whose matrices have equal masks (torch's batches need as many elements in each), one element missing."""
    data = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
    mask = torch.arange(shape[-2] * shape[-1]).reshape(shape[-2:]) % 3 > 0
    return md.masked_tensor(torch.where(mask, data, hidden), mask.expand(shape))


def stored(x: md.MaskedTensor, layout: torch.layout, **options: Any) -> md.MaskedTensor:
    return x.to_layout(layout, blocksize=(2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None, **options)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_they_are_those_of_the_torch_sparse_tensor(layout: torch.layout, shape: tuple[int, ...]) -> None:
    x = stored(sample(shape), layout)
    theirs = x.to_torch_sparse(7)
    assert type(x.values(7)) is Tensor
    assert torch.equal(x.values(7), theirs.values())
    for name in NAMES[layout]:
        mine = getattr(x, name)()
        assert type(mine) is Tensor
        assert torch.equal(mine, getattr(theirs, name)())
    pieces = [getattr(x, name)() for name in NAMES[layout]]
    if layout is torch.sparse_coo:
        again = torch.sparse_coo_tensor(*pieces, x.values(7), x.shape, check_invariants=True)
    else:
        again = torch.sparse_compressed_tensor(*pieces, x.values(7), x.shape, layout=layout, check_invariants=True)
    assert torch.equal(again.to_dense(), theirs.to_dense())


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_dense_dimensions_are_the_last_of_the_values(layout: torch.layout) -> None:
    data = torch.arange(24.0).reshape(2, 3, 4)
    x = md.masked_tensor(data, torch.tensor([[1, 0, 1], [0, 1, 0]])[..., None].expand(2, 3, 4)).to_layout(
        layout, sparse_dim=2
    )
    assert torch.equal(x.values(), torch.stack([data[0, 0], data[0, 2], data[1, 1]]))


def test_packed_rows() -> None:
    data = torch.arange(24.0).reshape(2, 3, 4)
    x = md.from_lengths(data, torch.tensor([1, 3])).to_packed()
    assert torch.equal(x.values(), torch.cat([data[0, :1], data[1]]))
    assert x.offsets().tolist() == [0, 1, 4]
    assert x.lengths().tolist() == [1, 3]
    assert x.col_indices().tolist() == [0, 0, 1, 2]


def test_values_are_differentiable() -> None:
    leaf = sample((4, 6)).requires_grad_()
    leaf.to_sparse_bsr((2, 3)).values(0).square().sum().backward()
    (leaf.to_sparse() ** 2).sum().backward()
    assert torch.equal(leaf.grad.get_mask(), leaf.get_mask())
    assert torch.equal(leaf.grad.to_tensor(0), 4 * leaf.detach().to_tensor(0))


@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_bsc], ids=str)
def test_nothing_under_the_mask_is_in_the_values(layout: torch.layout) -> None:
    x = stored(sample((4, 6)), layout)
    with pytest.raises(
        InvalidValueError,
        match=r"values\(\) of a masked tensor of shape \(4, 6\), stored as torch.sparse_bs.: 8 of 24 stored values are "
        r"invalid. Choose what they become: x.values\(fill\); or list valid elements alone: x.compressed\(\), or ",
    ):
        x.values()
    assert torch.equal(x.values(0), stored(sample((4, 6), 3e38), layout).values(0))
    with pytest.raises(ValueError, match=r"fill"):
        stored(md.masked_tensor(torch.ones(2, 3).int(), torch.eye(2, 3).bool()), layout).values(0.5)


def test_what_a_storage_does_not_have_is_refused() -> None:
    x = sample((4, 6))
    with pytest.raises(MaskedSemanticsError, match=r"values\(\) .* stored densely: .* x.get_data\(\)"):
        x.values()
    with pytest.raises(
        MaskedSemanticsError, match=r"indices\(\) .* torch.sparse_csr: it has values\(\), crow_indices\(\), col_"
    ):
        x.to_sparse_csr().indices()
    packed = md.from_lengths(torch.ones(2, 3, 4), torch.tensor([1, 3])).to_packed()
    with pytest.raises(MaskedSemanticsError, match=r"another order: undo transpose and flatten first"):
        packed.transpose(0, 1).values()
    uneven = md.masked_tensor(torch.ones(2, 2, 2), torch.tensor([[[1, 0], [0, 0]], [[1, 1], [0, 0]]])).to_sparse_csr()
    with pytest.raises(ValueError, match=r"store between 1 and 2 values each"):
        uneven.values()


def test_stored_bytes() -> None:
    x = md.masked_tensor(torch.ones(4, 6), torch.eye(4, 6).bool())
    assert md.masked_tensor(torch.ones(4, 6)).stored_bytes == 24 * 4
    assert x.stored_bytes == 24 * 4 + 24
    assert x[0].stored_bytes == 6 * 4 + 6
    assert md.from_lengths(torch.ones(4, 6, 5), torch.full((4,), 2)).stored_bytes == 4 * 6 * 5 * 4 + 4 * 6
    assert x.to_sparse().stored_bytes == 4 * 4 + 2 * 4 * 8
    assert x.to_sparse_csr().stored_bytes == 4 * 4 + 4 * 8 + 5 * 8
    assert md.as_masked_tensor(torch.ones(()).expand(4, 6)).stored_bytes == 4


# ------------------------------------------------------------------------------------------- pieces that are no views


PIECES: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "unsafe_split": lambda x: x.unsafe_split(2),
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, 3]),
    "unsafe_chunk of columns": lambda x: x.unsafe_chunk(2, 1),
    "_unsafe_view": lambda x: [torch.ops.aten._unsafe_view(x, (2, 8))],
}


@pytest.mark.parametrize("pieces, mask", zip(PIECES, cycle([MASK, MASK[:1], None]), strict=False))
def test_pieces_share_all_or_nothing(pieces: str, mask: Tensor | None) -> None:
    x = md.masked_tensor(torch.arange(16.0).reshape(4, 4), mask)
    before = state(x)
    for piece in PIECES[pieces](x):
        piece.fill_(50.0)
    assert state(x) == before
    found = PIECES[pieces](x)
    kept = [state(piece) for piece in found]
    x.fill_(60.0)
    assert [state(piece) for piece in found] == kept
