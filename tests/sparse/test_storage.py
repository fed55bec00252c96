"""Sparse storage: conversions, semantics that do not depend on it, gradients, and when something is stored densely."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import masked_dispatch as md
from op_registry.conformance.trials import STORAGES, Settings, run_operator
from sparse_layouts import LAYOUTS

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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_pass_through_conversions_and_operators(layout):
    dense = some_tensor((4, 6), requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return ((x.exp() * x).softmax(-1) * x).sum(0).square().sum()

    through = loss(stored(dense, layout))
    (gradient,) = torch.autograd.grad(through, dense)
    (expected,) = torch.autograd.grad(loss(dense), dense)
    assert through.item() == pytest.approx(loss(dense).item())
    same(gradient, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_of_a_sparse_leaf_is_stored_as_it_is(layout):
    leaf = stored(some_tensor((4, 6)), layout).requires_grad_()
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (leaf * weight).square().sum().backward()
    assert leaf.grad.storage_layout is layout
    assert torch.equal(leaf.grad.get_mask(), leaf.get_mask())
    assert type(weight.grad) is Tensor


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plain_tensor_is_updated_where_the_sparse_operand_is_valid(layout):
    gradient, state = some_tensor((4, 6)), torch.ones(4, 6, dtype=torch.float64)
    expected = state.clone().addcmul_(gradient, gradient)
    assert torch.equal(state.addcmul_(stored(gradient, layout), stored(gradient, layout)), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_in_place_on_sparse_storage(layout):
    x = some_tensor((4, 6))
    sparse = stored(x, layout)
    sparse.mul_(2).add_(some_tensor((4, 6), 0.7))
    same(sparse, x.clone().mul_(2).add_(some_tensor((4, 6), 0.7)))
    assert sparse.storage_layout is layout


def test_patterns_that_differ_are_joined():
    x, y = some_tensor((4, 6)), md.masked_tensor(torch.ones(4, 6), torch.arange(24).reshape(4, 6) % 3 > 0)
    for a in LAYOUTS:
        for b in LAYOUTS:
            with md.densify("never"):
                total = stored(x, a) + stored(y, b)
            assert total.storage_layout is a
            same(total, x + y)


def test_accumulate_unites_patterns():
    x, y = some_tensor((4, 6)), md.masked_tensor(torch.ones(4, 6).double(), torch.arange(24).reshape(4, 6) % 3 > 0)
    for layout in LAYOUTS:
        total = md.accumulate(stored(x, layout), stored(y, torch.sparse_coo))
        assert total.storage_layout is layout
        same(total, md.accumulate(x, y))


def test_counts_positions_and_facts():
    x = some_tensor((2, 4, 6))
    for layout in LAYOUTS:
        sparse = stored(x, layout)
        for dim in (None, 0, -1, (0, 2)):
            assert torch.equal(sparse.count(dim), x.count(dim))
        assert torch.equal(sparse.argmax().to_tensor(-1), x.argmax().to_tensor(-1))
        assert torch.equal(sparse.argmax(1).to_tensor(-1), x.argmax(1).to_tensor(-1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_copies_and_files(layout):
    sparse = stored(some_tensor((4, 6)), layout).requires_grad_()
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), torch.load(buffer, weights_only=True)):
        assert again.storage_layout is layout
        assert again.requires_grad
        same(again, sparse)


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


# -------------------------------------------------------------------------------------------------------- conformance

# Operators that have to stay sparse in every layout: one sample each, the others are the full tier's.
SPARSE = [
    "exp", "cos", "neg", "sqrt", "nn_functional_relu", "nn_functional_gelu", "add", "mul",
    "div_no_rounding_mode", "sub", "pow", "clamp", "maximum", "eq", "isnan", "masked_fill", "sum", "mean",
    "prod", "amax", "amin", "var", "std", "argmax", "any", "all", "logsumexp", "nansum", "norm", "median",
    "cumsum", "cumprod", "cummax", "softmax", "log_softmax", "sort", "argsort", "topk", "kthvalue", "clone",
    "zeros_like",
]  # fmt: skip


@pytest.mark.parametrize("entry", SPARSE)
def test_semantics_do_not_depend_on_storage(entry):
    settings = Settings(subject="masked_dispatch.conformance_subject:eager", laws=("P4",), most=1, storages=STORAGES)
    report = run_operator(entry, settings)
    assert not report.failures, "\n".join(f"{o.description}: {o.message}\n    {o.repro}" for o in report.failures[:4])
    assert report.count("pass"), "nothing was tried on sparse storage"


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
    ("layout", "word"), [(torch.sparse_coo, "amax"), (torch.sparse_csr, "amin"), (torch.sparse_csc, "amax")]
)
def test_the_extremum_of_a_slice_is_one_of_its_elements(layout, word):
    """Neither 0, nor what an empty slice begins with."""
    sign = -1 if word == "amax" else 1
    x = md.masked_tensor(sign * torch.arange(1.0, 13).reshape(3, 4), torch.ones(3, 4, dtype=torch.bool).triu(1))
    for dim in (0, 1):
        found, expected = (getattr(t, word)(dim) for t in (x.to_layout(layout), x))
        assert torch.equal(found.get_mask(), expected.get_mask())
        assert torch.equal(found.to_tensor(0), expected.to_tensor(0))


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
