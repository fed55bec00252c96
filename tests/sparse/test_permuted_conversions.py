"""A sparsely stored tensor whose dimensions are seen in another order: it is converted without storing it densely."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from permuted_rows import permuted


def heads() -> md.MaskedTensor:
    """(2, 2, 4, 3): the heads of a packed batch, before time."""
    x = md.from_lengths(torch.arange(48.0).reshape(2, 4, 6), torch.tensor([3, 2])).to_packed()
    return x.unflatten(-1, (2, 3)).transpose(1, 2)


CONVERSIONS: dict[str, Callable[[md.MaskedTensor], Tensor]] = {
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse(1)": lambda x: x.to_sparse(1),
    "to_sparse_csr": lambda x: x.to_sparse_csr(),
    "to_sparse_csc": lambda x: x.to_sparse_csc(),
    "to_sparse_bsr": lambda x: x.to_sparse_bsr((2, 1)),
    "to_sparse_bsc": lambda x: x.to_sparse_bsc((2, 3)),
    "to_packed": lambda x: x.to_packed(),
    "to_torch_sparse": lambda x: x.to_torch_sparse(),
    "to_torch_sparse by rows": lambda x: x.to_torch_sparse(layout=torch.sparse_csr),
    "to_torch_sparse, hybrid": lambda x: x.to_torch_sparse(0, sparse_dim=1),
}
FIT_HEADS = ("to_sparse", "to_sparse(1)", "to_torch_sparse", "to_torch_sparse, hybrid", "to_packed")

CASES = [(permuted, name) for name in CONVERSIONS] + [(heads, name) for name in FIT_HEADS]


def in_full(x: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(x, md.MaskedTensor):
        return x.to_tensor(0), x.get_mask()
    return x.to_dense(), None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("make", "name"), CASES)
def test_without_dense_storage(make: Callable[[], md.MaskedTensor], name: str) -> None:
    convert, x = CONVERSIONS[name], make()
    with md.densify("never"):
        converted = convert(x)
    want = convert(x.to_dense())
    assert converted.layout is want.layout
    if isinstance(converted, md.MaskedTensor):
        assert converted.storage_layout is want.storage_layout
        assert converted.nnz == want.nnz
    for mine, theirs in zip(in_full(converted), in_full(want), strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("convert", [lambda x: x.to_sparse_csr(), lambda x: x.to_sparse()])
def test_gradients(convert: Callable[[md.MaskedTensor], md.MaskedTensor]) -> None:
    leaves = [permuted().detach().requires_grad_() for _ in range(2)]
    for x, y in zip(leaves, (convert(leaves[0]), leaves[1].to_dense()), strict=True):
        (y * y).sum().backward()
        assert x.grad is not None
    assert torch.equal(leaves[0].grad.get_mask(), leaves[1].grad.get_mask())
    assert torch.equal(leaves[0].grad.to_tensor(0), leaves[1].grad.to_tensor(0))


def test_of_a_shape_that_no_machine_stores() -> None:
    indices, values = torch.tensor([[5, 2**50 - 1]]), torch.ones(2, 3)
    stored = torch.sparse_coo_tensor(indices, values, (2**50, 3), is_coalesced=True, check_invariants=False)
    x = md.as_masked_tensor(stored).t()
    with md.densify("never"):
        assert x.to_torch_sparse().indices().tolist() == [[0, 0, 1, 1, 2, 2], [5, 2**50 - 1] * 3]
        assert x.to_sparse_csr().nnz == 6
