"""A storage of our own: what is asked of every storage (P3, P4, P5), and by hand."""

import copyreg
import io

import pytest
import torch
from third_party import RULES
from third_party.ellpack import ELLPACK
from torch import Tensor
from torch.testing import assert_close

import masked_dispatch as md
from op_registry.conformance.masks import ONE_HOLE
from op_registry.conformance.trials import Settings, run_operator
from op_registry.testing import instantiate

# Our own operators, every law that looks at storage.
test_laws_in_ellpack = instantiate(RULES, laws=("P3", "P4", "P5"), layouts=[ELLPACK])

# Masks of every operand: one that is left plain has no layout.
MASKS = ("half", "slices", "empty", ONE_HOLE)
# Entries of torch's operator database of which nothing is stored densely, and some of which something is.
SPARSE = [
    "exp", "clamp", "add", "mul", "where", "sum", "mean", "amax", "prod", "var", "argmax", "any", "logsumexp", "cumsum",
    "sort", "topk", "softmax", "bmm", "transpose", "reshape", "index_select", "gather", "masked_fill", "stack", "roll",
    "diff", "median", "count_nonzero", "unique", "squeeze", "diagonal", "nn.functional.layer_norm",
    "nn.functional.mse_loss", "expand", "unfold", "kthvalue", "take", "trace", "cdist", "matmul",
]  # fmt: skip
DENSE_TOO = ["mm", "tril", "nn.functional.conv2d", "quantile"]


@pytest.mark.parametrize("entry", SPARSE + DENSE_TOO)
def test_as_on_dense_storage(entry: str) -> None:
    report = run_operator(entry, Settings(laws=("P4",), storages=(ELLPACK.name,), most=2, masks=MASKS))
    assert report.failures == []
    assert ("densified" if entry in DENSE_TOO else "pass") in report.counts["P4"]
    assert set(report.counts["P4"]) <= ({"pass", "densified"} if entry in DENSE_TOO else {"pass"})


def dense(dtype: torch.dtype = torch.float64) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 7, generator=generator) < 0.4
    data = torch.randn(5, 7, generator=generator, dtype=dtype)
    return md.masked_tensor(torch.where(mask, data, torch.nan), mask)


def stored() -> md.MaskedTensor:
    return dense().to_layout(ELLPACK)


def same(x: Tensor, y: Tensor) -> None:
    assert torch.equal(x.get_mask(), y.get_mask())
    assert_close(x.to_tensor(0), y.to_tensor(0))


def test_rows_are_as_wide_as_the_fullest_one() -> None:
    mask = torch.tensor([[False, False, True], [True, False, True], [False, False, False]])
    x = md.masked_tensor(torch.arange(9.0).reshape(3, 3), mask).to_layout(ELLPACK)
    assert x.storage_layout is ELLPACK
    assert x.nnz == 6  # two in each row
    assert x._pattern.pieces[0].tolist() == [0, 2, 0, 2, 0, 1]
    same(x, md.masked_tensor(torch.arange(9.0).reshape(3, 3), mask))


@pytest.mark.parametrize(
    "layout", [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.jagged], ids=str
)
def test_there_and_back(layout: torch.layout) -> None:
    with md.densify("never"):
        other = stored().to_layout(layout)
        back = dense().to_layout(layout).to_layout(ELLPACK)
    same(other, dense())
    same(back, dense())
    assert layout is torch.strided or other.nnz == int(dense().count())  # what fills the rows is left behind


def test_blocks_there_and_back() -> None:
    same(dense().to_sparse_bsr((5, 1)).to_layout(ELLPACK), dense())
    same(stored().to_sparse_bsc((1, 7)), dense())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3)])
def test_empty_ones(shape: tuple[int, ...]) -> None:
    x = md.masked_tensor(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
    same(x.to_layout(ELLPACK) + 1, x + 1)


def test_nothing_is_stored_densely() -> None:
    x, y = dense(), stored()
    with md.densify("never"):
        pairs = [
            (x.exp() - 2 * x, y.exp() - 2 * y),
            (x.sum(0), y.sum(0)),
            (x.sum(1), y.sum(1)),
            (x.amax(1), y.amax(1)),
            (x.softmax(1), y.softmax(1)),
            (x @ torch.ones(7, 2).double(), y @ torch.ones(7, 2).double()),
            (x[1:3].t(), y[1:3].t()),
            (x + x, y + dense().to_sparse_csc()),
            (md.accumulate(x, x.t().t()), md.accumulate(y, dense().to_layout(ELLPACK))),
        ]
    for expected, found in pairs:
        same(found, expected)


def test_what_stays_where_it_is_stays_ellpack() -> None:
    assert stored().exp().storage_layout is ELLPACK
    assert stored().t().storage_layout is torch.sparse_csr  # other rows, of other lengths


def test_gradients() -> None:
    weight = torch.randn(7, 3, dtype=torch.float64)
    found = []
    for leaf in (dense().requires_grad_(), stored().requires_grad_()):
        ((leaf.exp() @ weight).sum(1) ** 2).sum().backward()
        found.append(leaf.grad)
    same(*found)
    assert found[1].storage_layout is ELLPACK
    same(md.functional.grad(lambda t: t.exp().sum())(stored()), md.functional.grad(lambda t: t.exp().sum())(dense()))


def test_written_to_in_place() -> None:
    x = stored()
    x.mul_(2)
    same(x, dense() * 2)
    x.copy_(dense().to_sparse_csr() + 1)
    same(x, dense() + 1)
    assert x.storage_layout is ELLPACK


def saved(x: md.MaskedTensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


def test_saved_and_loaded() -> None:
    loaded = torch.load(saved(stored()), weights_only=True)
    assert loaded.storage_layout is ELLPACK
    same(loaded, dense())


@pytest.mark.parametrize(
    ("column", "problem"), [(9, "run from 0 to 9"), (0, "list an element twice, or are not in the order of ellpack")]
)
def test_a_damaged_file_is_refused(column: int, problem: str) -> None:
    x = stored()
    x._pattern.pieces[0][-1] = column
    with pytest.raises(ValueError, match=problem):
        torch.load(saved(x), weights_only=True)


def test_a_file_with_rows_of_different_lengths_is_refused() -> None:
    _, (_, _, pieces, *_) = stored().__reduce_ex__(2)
    load, (*version, values, validity, layout, sizes, (columns,), block) = copyreg.dispatch_table[type(pieces)](pieces)
    with pytest.raises(ValueError, match="its 5 rows store 29 elements"):
        load(*version, values[1:], validity[1:], layout, sizes, (columns[1:],), block)


def test_compiled() -> None:
    compiled = torch.compile(lambda t: (t.exp() * 2).sum(1), fullgraph=True, backend="aot_eager")
    same(compiled(stored()), (dense().exp() * 2).sum(1))
    fuller = dense().mask_with(torch.ones(5, 7, dtype=torch.bool)).to_layout(ELLPACK)
    same(compiled(fuller), (dense().exp() * 2).sum(1))


def test_made_in_a_graph_it_is_refused_with_a_reason() -> None:
    compiled = torch.compile(lambda t: t.to_layout(ELLPACK), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="how many elements the fullest row of ELLPACK has is not known"):
        compiled(dense())
