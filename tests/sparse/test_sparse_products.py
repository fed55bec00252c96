"""Matrix products with sparse storage: what dense storage gives, without ever storing densely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import masked_dispatch as md
from op_registry.errors import MaskedSemanticsError
from op_registry.sparse.contraction import RowColumn, sddmm, spmm
from storages import BY_NAME as LAYOUTS

M, K, N = 6, 4, 8


def masked(*shape: int, seed: int = 0, density: float = 0.5, dtype: torch.dtype = torch.float64) -> md.MaskedTensor:
    """Values of both signs, and NaN where invalid; the first row has nothing valid."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < density
    mask[..., 0, :] = False
    data = torch.where(mask, torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype), torch.nan)
    return md.masked_tensor(data, mask)


def plain(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stored(x: md.MaskedTensor, layout: str) -> md.MaskedTensor:
    return x.to_layout(LAYOUTS[layout], blocksize=(2, 2) if layout[0] == "b" else None)


# A layout; a function of a matrix (M, K) that is stored so, or of a batch of them, and of other operands. P4 asks the
# operators of torch's database: these are the products that its samples lack.
PRODUCTS: dict[str, tuple[str, Callable[..., Tensor], tuple[Callable[[], Tensor], ...]]] = {
    "matrix by plain": ("bsr", torch.mm, (lambda: plain(K, N),)),
    "masked by matrix": ("coo", lambda x, y: y @ x, (lambda: masked(3, M, seed=2),)),
    "matrix by masked vector": ("csr", torch.matmul, (lambda: masked(2, K, seed=3)[1],)),
    "vector by matrix": ("bsc", lambda x, y: y @ x, (lambda: plain(M),)),
    "matrix by its transpose": ("csc", lambda x: x @ x.t(), ()),
    "linear of masked parameters": ("coo", F.linear, (lambda: masked(N, K, seed=2), lambda: masked(2, N, seed=3)[1])),
    "beta = 0": (
        "csr",
        lambda x, s, y: torch.addmm(s, x, y, beta=0),
        (lambda: masked(M, N, seed=4), lambda: plain(K, N)),
    ),
    "sampled of masked": ("csc", torch.addmm, (lambda: masked(M, 3, seed=5), lambda: masked(3, K, seed=6))),
}


def leaves(*tensors: Any) -> list[Any]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def filled(x: Tensor | None) -> Any:
    if x is None:  # nothing came back, where with beta = 0 dense storage gives zeros
        return torch.zeros(M, N, dtype=torch.float64)
    return x.to_dense().to_tensor(0) if isinstance(x, md.MaskedTensor) else x


def check(layout: str, function: Callable[..., Tensor], x: md.MaskedTensor, others: list[Tensor]) -> None:
    dense, *beside = leaves(x, *others)
    sparse, *beside_sparse = leaves(stored(x, layout), *others)
    expected = function(dense, *beside)
    with md.densify("never"):
        found = function(sparse, *beside_sparse)
        assert torch.equal(found.to_dense().get_mask(), expected.get_mask())
        torch.testing.assert_close(filled(found), filled(expected))
        found.square().sum().to_tensor(0).backward()
    expected.square().sum().to_tensor(0).backward()
    for mine, others_ in zip([sparse, *beside_sparse], [dense, *beside], strict=True):
        torch.testing.assert_close(filled(mine.grad), filled(others_.grad))
    assert sparse.grad.storage_layout is LAYOUTS[layout]


@pytest.mark.parametrize(("layout", "function", "others"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_is_that_of_dense_storage(layout, function, others):
    check(layout, function, masked(M, K), [make() for make in others])


def test_sampled_addmm_of_a_masked_tensor_is_addmm_in_its_places():
    x, a, b = masked(M, K).to_sparse_csr(), plain(M, 3), plain(3, K)
    with md.densify("never"):
        found = torch.sparse.sampled_addmm(x, a, b, beta=2.0, alpha=3.0)
    assert torch.equal(found.get_mask(), x.get_mask())
    torch.testing.assert_close(filled(found), filled(x.to_dense() * 2 + 3 * (a @ b)))


def test_sampled_addmm_of_two_dtypes_says_that_they_differ():
    x, a, b = masked(M, K).double().to_sparse_csr(), plain(M, 3).float(), plain(3, K).float()
    with pytest.raises(RuntimeError, match=r"of torch\.float64 with factors of .*, x\.to\(torch\.float32\)"):
        torch.sparse.sampled_addmm(x, a, b, beta=0)


def test_sampled_addmm_of_dense_storage_says_how_to_store_it_sparsely():
    with pytest.raises(MaskedSemanticsError, match=r"in sparse storage, .* x\.to_sparse_csr\(\) of a masked one"):
        torch.sparse.sampled_addmm(masked(M, K), plain(M, 3), plain(3, K), beta=0)


@pytest.mark.parametrize("shape", [(0, K), (M, 0), (0, 0)])
def test_of_nothing_there_is_what_dense_storage_gives(shape):
    x = md.masked_tensor(torch.ones(shape), torch.ones(shape, dtype=torch.bool))
    other = torch.ones(shape[1], 3)
    found, expected = x.to_sparse_csr() @ other, x @ other
    assert torch.equal(found.get_mask(), expected.get_mask())
    assert torch.equal(filled(found), filled(expected))


def test_nothing_stored_gives_nothing_valid():
    x = md.masked_tensor(torch.ones(M, K), torch.zeros(M, K, dtype=torch.bool)).to_sparse_csr()
    assert not (x @ torch.ones(K, N)).get_mask().any()
    assert (x @ x.t()).nnz == 0


def test_shapes_that_do_not_fit_raise_torchs_own_error():
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(6x4 and 6x4\)"):
        masked(M, K).to_sparse() @ plain(M, K)


@pytest.mark.parametrize("block", [(1, 1), (2, 1), (1, 2), (6, 1), (1, 4)])
@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_bsc])
def test_blocks_of_one_row_or_column(layout, block):
    """The coordinates of their elements are expanded, not copied."""
    for mask in (masked(M, K).get_mask(), torch.arange(M * K).view(M, K) == 5):
        x = md.masked_tensor(plain(M, K), mask).to_layout(layout, blocksize=block).requires_grad_()
        y = plain(K, N).requires_grad_()
        with md.densify("never"):
            (x @ y).sum().backward()
        torch.testing.assert_close(y.grad, x.detach().to_tensor(0.0).sum(0)[:, None].expand(K, N))
        torch.testing.assert_close(x.grad.to_tensor(0.0), torch.where(mask, y.detach().sum(1), 0))


@pytest.mark.parametrize("in_order", [True, False])
def test_the_kernels_have_derivatives_of_every_order(in_order):
    """What multiply and sample say of themselves: each is the derivative of the other."""
    mask = torch.rand(5, 4, generator=torch.Generator().manual_seed(3)) < 0.6
    row, column = mask.nonzero(as_tuple=True)
    if not in_order:
        shuffled = torch.randperm(len(row), generator=torch.Generator().manual_seed(4))
        row, column = row[shuffled], column[shuffled]
    coordinates = RowColumn(row, column, 5, 4, in_order=in_order)
    values, dense, left, right = plain(len(row)), plain(4, 3), plain(5, 3, seed=2), plain(4, 3, seed=3)
    whole = torch.zeros(5, 4, dtype=torch.float64).index_put((row, column), values)
    torch.testing.assert_close(spmm(values, dense, coordinates), whole @ dense)
    torch.testing.assert_close(sddmm(left, right, coordinates), (left @ right.t())[row, column])
    for function, arguments in ((spmm, (values, dense)), (sddmm, (left, right))):
        inputs = [a.clone().requires_grad_() for a in arguments]
        assert gradcheck(lambda *a, f=function: f(*a, coordinates), inputs)
        assert gradgradcheck(lambda *a, f=function: f(*a, coordinates), inputs)
        # The plain formula, which a graph and other dtypes take, says the same.
        narrow = [a.to(torch.complex128) for a in arguments]
        torch.testing.assert_close(function(*narrow, coordinates).real, function(*arguments, coordinates))


def test_rows_are_no_matrix_where_torch_wants_one():
    x = md.masked_tensor(torch.ones(2, 3, 4), torch.ones(2, 3, 1, dtype=torch.bool)).to_packed()
    with pytest.raises(RuntimeError, match="self must be a matrix"):
        x.mm(torch.ones(4, 5))


REFUSALS: dict[str, tuple[Callable[[md.MaskedTensor], Tensor], str]] = {
    "contracted": (
        lambda x: F.linear(x.transpose(0, 2), torch.ones(5, 2)),
        "it contracts dimension 2 of its operand `input`, which stands before sparse ones",
    ),
    "another dtype": (
        lambda x: torch.mm(x.to_dense()[0].to_sparse_csr(), torch.ones(4, 5, dtype=torch.float64)),
        r"its operands have the dtypes torch\.float32, torch\.float64",
    ),
}


@pytest.mark.parametrize(("function", "said"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_names_the_dimension(function, said):
    x = md.masked_tensor(torch.ones(2, 3, 4), torch.ones(2, 3, 1, dtype=torch.bool)).to_packed()
    with md.densify("never"), pytest.raises(md.MaskedSemanticsError, match=said):
        function(x)


def test_what_is_more_than_a_sum_runs_on_stored_rows():
    x = md.masked_tensor(torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 1, 0]], dtype=torch.bool)[..., None])
    bias, weight = torch.randn(5), torch.randn(4, 5)
    with md.densify("never"):
        found = torch.ops.aten._addmm_activation(bias, x.to_packed().view(-1, 4), weight, use_gelu=True)
    expected = torch.ops.aten._addmm_activation(bias, x.view(-1, 4), weight, use_gelu=True)
    assert torch.equal(found.to_dense().get_mask(), expected.get_mask())
    torch.testing.assert_close(filled(found), filled(expected))


def test_vdot_conjugates_stored_elements():
    x = md.masked_tensor(torch.randn(6, dtype=torch.complex64), torch.arange(6) % 2 == 0)
    y = torch.randn(6, dtype=torch.complex64)
    with md.densify("never"):
        found = torch.vdot(x.to_sparse(), y)
    torch.testing.assert_close(filled(found), filled(torch.vdot(x, y)))
