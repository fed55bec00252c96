"""`is_coalesced` and `coalesce`: of what lists each element once, so nothing is left to do."""

from __future__ import annotations

import pytest
import torch

import masked_dispatch as md

X = md.masked_tensor([[1.0, 2.0], [3.0, 4.0]], [[True, False], [True, True]])


def test_coo_is_coalesced_and_coalesces_to_itself() -> None:
    x = X.to_sparse()
    assert x.is_coalesced()
    assert x.coalesce() is x


def test_the_gradient_of_an_embedding_is_coalesced() -> None:
    weight = torch.zeros(5, 2, requires_grad=True)
    torch.nn.functional.embedding(md.masked_tensor([1, 3, 1], [True, True, True]), weight, sparse=True).sum().backward()
    gradient = weight.grad
    assert isinstance(gradient, md.MaskedTensor)
    assert gradient.is_coalesced()
    assert gradient.coalesce().indices().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    "storage, name", [("to_dense", "Strided"), ("to_sparse_csr", "SparseCsr"), ("to_packed", "Jagged")]
)
def test_other_storages_raise_as_torch_does(storage: str, name: str) -> None:
    x = getattr(X, storage)()
    for asked in ("is_coalesced", "coalesce"):
        with pytest.raises(RuntimeError, match=f"^{asked} expected sparse coordinate tensor layout but got {name}, "):
            getattr(x, asked)()
    with pytest.raises(RuntimeError, match=r"^coalesce expected sparse coordinate tensor layout but got Strided"):
        torch.zeros(2).coalesce()
