"""Sparse storage: layouts as values, semantics that do not depend on them, and when something is stored densely."""

from __future__ import annotations

import copy
import io
import pickle
import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import masked_dispatch as md
from comparison import same as alike
from numbered_layout import NUMBERED
from numbered_layout import some as numbers
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
from storages import LAYOUTS

SHAPES = [((4, 6), None), ((2, 4, 6), None), ((4, 6, 3), 2), ((2, 4, 6, 3), 3), ((0, 6), None)]


def stored(x: md.MaskedTensor, layout: torch.layout, sparse_dim: int | None = None) -> md.MaskedTensor:
    blocks = {"blocksize": (2, 3)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return x.to_layout(layout, sparse_dim=sparse_dim, **blocks)


def some_tensor(shape: tuple[int, ...], valid: float = 0.5, **options) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(shape, generator=generator) < valid
    data = torch.randn(shape, generator=generator, dtype=torch.float64)
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask, **options)


def same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.get_mask(), b.get_mask())
    torch.testing.assert_close(a.to_tensor(0), b.to_tensor(0))


@pytest.mark.parametrize(
    ("layout", "shape", "sparse_dim", "valid"),
    [(LAYOUTS[n % 5], *SHAPES[(n + n // 5) % 5], (0.5, 0.0, 1.0)[n % 3]) for n in range(15)],
    ids=str,
)
def test_there_and_back_through_every_other_layout(layout, shape, sparse_dim, valid):
    x = some_tensor(shape, valid)
    first = stored(x, layout, sparse_dim)
    assert first.storage_layout is layout
    assert first.layout is torch.strided
    for other in LAYOUTS:
        # Blocks are those of all dimensions, however something is stored; other layouts keep the dense dimensions.
        blocks = other in (torch.sparse_bsr, torch.sparse_bsc)
        again = stored(first, other, sparse_dim if blocks else None)
        assert again.storage_layout is other
        same(again.to_dense(), x)
        direct = stored(x, other, sparse_dim)
        assert again.nnz == direct.nnz


def test_a_valid_zero_is_stored_and_an_invalid_number_is_not():
    x = md.masked_tensor(torch.tensor([[0.0, 5.0], [0.0, 7.0]]), torch.tensor([[True, False], [False, True]]))
    sparse = x.to_sparse()
    assert sparse.nnz == 2
    assert sparse.get_mask().tolist() == x.get_mask().tolist()
    assert sparse.exp().to_tensor(-1).tolist() == x.exp().to_tensor(-1).tolist()


def test_it_prints_what_it_is():
    x = md.masked_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, True]]))
    assert repr(x.to_sparse_csr()) == f"{repr(x)[:-1]},\n              stored as torch.sparse_csr, nnz=2)"
    large = md.masked_tensor(torch.ones(100, 100), torch.eye(100).bool()).to_sparse()
    assert repr(large).endswith("(1.0%), True=valid,\n              stored as torch.sparse_coo, nnz=100)")


# ----------------------------------------------------------------------------------------------------- stored densely


def test_what_has_no_sparse_form_is_stored_densely_or_refused():
    sparse = some_tensor((4, 6)).to_sparse_csr()
    same(torch.fft.fftshift(sparse), torch.fft.fftshift(sparse.to_dense()))
    message = (
        "torch.tril has no sparse form for this call: it moves elements, and no lowering computes their new "
        "coordinates. Its operands are stored sparsely (shape (4, 6) as torch.sparse_csr with "
        f"{sparse.nnz} stored) and would take 216 bytes densely, which "
        "the current policy does not allow (densify('never')). Store them densely by x.to_dense(), or allow it "
        "inside `with masked_dispatch.densify('always'):`."
    )
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=f"^{re.escape(message)}$"):
        sparse.tril()
    with md.densify("auto", limit=100), pytest.raises(md.MaskedSemanticsError, match=r"densify\('auto', limit=100\)"):
        sparse.tril()
    with md.densify("always", limit=1):
        sparse.tril()
    with pytest.raises(ValueError, match="densify takes 'never', 'warn', 'auto' or 'always', not 'maybe'"):  # noqa: SIM117
        with md.densify("maybe"):
            pass


def test_a_view_of_sparse_storage_says_that_it_is_a_copy():
    view = some_tensor((4, 6)).to_sparse()[0]
    with pytest.raises(md.MaskedSemanticsError, match="of a sparsely stored tensor; the view"):
        view.mul_(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": torch.sparse_bsr}, "torch.sparse_bsr needs a blocksize (rows, columns)"),
        ({"layout": torch.sparse_csr, "blocksize": (2, 2)}, "torch.sparse_csr has no blocks"),
        ({"layout": torch.sparse_bsr, "blocksize": (3, 2)}, "blocks of (3, 2) do not divide a matrix of (4, 6)"),
        (
            {"layout": torch.sparse_csr, "sparse_dim": 1},
            "has at least 2 sparse dimensions and at most 2, not 1;",
        ),
        (
            {"layout": torch.sparse_coo, "sparse_dim": 3},
            "torch.sparse_coo of a tensor of shape (4, 6) has at least 1 sparse dimension and at most 2",
        ),
        ({"layout": torch._mkldnn}, "torch._mkldnn is not a storage layout; choose from torch.strided, torch"),
    ],
)
def test_storage_that_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        some_tensor((4, 6)).to_layout(arguments.pop("layout"), **arguments)


# ----------------------------------------------------------------------------------------------- surface of the tensor


def test_values_leave_only_where_all_are_valid():
    whole = md.masked_tensor(torch.ones(2, 2)).to_sparse()
    assert whole.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert whole.sum().item() == 4
    with pytest.raises(md.InvalidValueError, match=r"numpy\(\) of a masked tensor of shape \(4, 6\)"):
        some_tensor((4, 6)).to_sparse().numpy()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pattern_moves_with_its_values(layout):
    moved = stored(some_tensor((4, 6)), layout).to("meta")
    assert moved.storage_layout is layout
    assert {moved.device, moved._pattern.device} == {torch.device("meta")}


@pytest.mark.parametrize(
    ("layout", "function"),
    [
        (torch.sparse_coo, lambda x: x.exp() * x),
        (torch.sparse_csr, lambda x: x.sum(1)),
        (torch.sparse_csc, lambda x: x.amax(0)),
        (torch.sparse_coo, lambda x: x.softmax(1)),
        (torch.sparse_csr, lambda x: x @ torch.linspace(0, 1, 12, dtype=torch.float64).reshape(6, 2)),
        (torch.sparse_csc, lambda x: x.t().sort(0)[0]),
        (torch.sparse_coo, lambda x: x.to_sparse_csr().mean(0)),
        (torch.sparse_csc, lambda x: x.to_dense().exp()),
    ],
)
def test_forward_mode_is_that_of_dense_storage(layout, function):
    x, tangent = some_tensor((4, 6)).to(torch.float64), some_tensor((4, 6)).to(torch.float64)
    tangents = []
    for stored in (torch.strided, layout):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.to_layout(stored), (tangent * 3).to_layout(stored))
            result, found = forward_ad.unpack_dual(function(dual))
            assert torch.equal(found.get_mask() | ~result.get_mask(), torch.ones(result.shape, dtype=torch.bool))
            tangents.append(found.to_dense().to_tensor(0))
    torch.testing.assert_close(tangents[1], tangents[0])


def test_records_count_over_dimensions_as_torch_means_them() -> None:
    mask = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    dense = md.masked_tensor(torch.ones(3, 4, 5), mask)
    for x in (dense.to_layout(torch.sparse_coo), dense.to_layout(torch.sparse_coo, sparse_dim=1)):
        for record, valid in ((x.record, mask), (x.permute(2, 0, 1).record, mask.permute(2, 0, 1))):
            for dim in (None, 0, -1, 1, (), (0, 2), [1, -1], (-3, 1, 2)):
                for keepdim in (False, True):
                    got = record.count(dim, keepdim)
                    assert torch.equal(got, valid.sum(dim, keepdim=keepdim)), (dim, keepdim)


# ----------------------------------------------------------------------------------------- a layout of somebody's own


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
    x = numbers(shape).requires_grad_()
    stored = x.to_layout(NUMBERED)
    assert stored.nnz == int(x.count())
    alike(stored, x)
    others = [torch.sparse_coo, *([torch.sparse_csr, torch.sparse_csc] if len(shape) > 1 else [])]
    for layout in others:
        alike(stored.to_layout(layout), x)
        alike(x.to_layout(layout).to_layout(NUMBERED), x)
    (found,) = torch.autograd.grad(stored.square().sum(), x)
    alike(found, x.detach() * 2)


def test_rows_of_it() -> None:
    x = md.from_lengths(torch.randn(3, 4, 5), torch.tensor([4, 1, 2]))
    stored = x.to_layout(NUMBERED, sparse_dim=2)
    assert stored.nnz == 7
    alike(torch.nn.functional.layer_norm(stored, (5,)), torch.nn.functional.layer_norm(x, (5,)))


def test_a_file_names_it() -> None:
    file = io.BytesIO()
    torch.save(numbers((4, 6)).to_layout(NUMBERED), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.storage_layout is NUMBERED
    alike(loaded, numbers((4, 6)))


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
        numbers((2, 3)).to_layout(ThreePieces())


def test_what_a_layout_has_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="numbered has no blocks"):
        numbers((2, 3)).to_layout(NUMBERED, blocksize=(1, 1))
    with pytest.raises(ValueError, match=r"numbered of a tensor of shape \(2, 3\) has at least 1 sparse dimension"):
        numbers((2, 3)).to_layout(NUMBERED, sparse_dim=3)
