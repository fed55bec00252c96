"""Layouts as values, and one of somebody's own with the two methods that docs/add-a-storage.md asks for."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch

import masked_dispatch as md
from numbered_layout import NUMBERED, same, some
from op_registry.authoring import Layout, register_layout
from op_registry.conformance.trials import Settings, run_operator
from op_registry.sparse.layout import (
    BSC,
    BSR,
    BUILT_IN,
    COO,
    CSC,
    CSR,
    PACKED,
    Compressed,
    Coo,
    layout_named,
    layout_of,
)

# ---------------------------------------------------------------------------------------------------- the built-in ones


def test_layouts_are_values() -> None:
    assert len({*BUILT_IN, *BUILT_IN}) == 6
    assert (Coo(), Compressed("column", blocks=True)) == (COO, BSC)
    assert CSR != PACKED
    for layout in BUILT_IN:
        assert layout_named(layout.name) is layout
        assert layout_of(layout.torch_layout) is layout_of(layout) is layout
        assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
        assert str(layout) == str(layout.torch_layout)
    assert layout_of(torch.strided) is layout_of("torch.sparse_csr") is None


@pytest.mark.parametrize(("layout", "room"), [(COO, [1, 2, 3]), (CSR, [2, 3]), (BSC, [2, 3]), (PACKED, [2])], ids=str)
def test_room_for_dimensions(layout: Layout, room: list[int]) -> None:
    assert [dims for dims in (1, 2, 3) if layout.has_room(dims)] == room
    exact = {BSC: CSC, BSR: CSR}.get(layout, layout)
    assert [layout.with_room(dims) for dims in (1, 2, 3)] == [exact if dims in room else COO for dims in (1, 2, 3)]


# ------------------------------------------------------------------------------------------------------ somebody's own


@pytest.mark.parametrize(
    "entry", ["exp", "sum", "softmax", "sort", "mm", "index_select", "cat", "reshape", "transpose", "where"]
)
def test_p4_holds_in_it(entry: str) -> None:
    report = run_operator(entry, Settings(laws=("P4",), storages=(NUMBERED.short,), most=2))
    assert report.failures == []
    assert report.counts["P4"]["pass"] > 0


@pytest.mark.parametrize("shape", [(50,), (4, 6), (2, 3, 4), (300, 300)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    x = some(shape).requires_grad_()
    stored = x.to_layout(NUMBERED)
    assert stored.nnz == int(x.count())
    same(stored, x)
    others = [torch.sparse_coo, *([torch.sparse_csr, torch.sparse_csc] if len(shape) > 1 else [])]
    for layout in others:
        same(stored.to_layout(layout), x)
        same(x.to_layout(layout).to_layout(NUMBERED), x)
    (found,) = torch.autograd.grad(stored.square().sum(), x)
    same(found, x.detach() * 2)


def test_rows_of_it() -> None:
    x = md.from_lengths(torch.randn(3, 4, 5), torch.tensor([4, 1, 2]))
    stored = x.to_layout(NUMBERED, sparse_dim=2)
    assert stored.nnz == 7
    same(torch.nn.functional.layer_norm(stored, (5,)), torch.nn.functional.layer_norm(x, (5,)))


def test_a_file_names_it() -> None:
    file = io.BytesIO()
    torch.save(some((4, 6)).to_layout(NUMBERED), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.storage_layout is NUMBERED
    same(loaded, some((4, 6)))


@dataclass(frozen=True)
class Impostor(Layout):
    name = "numbered"


@dataclass(frozen=True)
class ThreePieces(Layout):
    name = "three pieces"
    piece_dims = (1, 1, 1)


def test_what_cannot_be_registered() -> None:
    assert register_layout(NUMBERED) is NUMBERED
    with pytest.raises(ValueError, match="another storage called numbered"):
        register_layout(Impostor())
    with pytest.raises(ValueError, match="three pieces has 3 index tensors"):
        register_layout(ThreePieces())
    with pytest.raises(ValueError, match=r"three pieces is not a storage layout; choose from torch\.strided, torch"):
        some((2, 3)).to_layout(ThreePieces())


def test_what_a_layout_has_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="numbered has no blocks"):
        some((2, 3)).to_layout(NUMBERED, blocksize=(1, 1))
    with pytest.raises(ValueError, match=r"numbered of a tensor of shape \(2, 3\) has at least 1 sparse dimension"):
        some((2, 3)).to_layout(NUMBERED, sparse_dim=3)
