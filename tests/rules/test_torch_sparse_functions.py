"""The functions of torch.sparse mean what the functions of these names mean without it, in every storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError
from storages import STORAGES

MASK = torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, True]])
Call = Callable[[Tensor], Tensor]
W = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
B = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
SAME: dict[str, tuple[Call, Call]] = {
    "mm": (lambda x: torch.sparse.mm(x, W), lambda x: torch.mm(x, W)),
    "mm of two": (lambda x: torch.sparse.mm(x, x.t()), lambda x: torch.mm(x, x.t())),
    "mm by sums": (lambda x: torch.sparse.mm(x, W, "sum"), lambda x: torch.mm(x, W)),
    "addmm": (
        lambda x: torch.sparse.addmm(B, x, W, beta=0.5, alpha=2.0),
        lambda x: torch.addmm(B, x, W, beta=0.5, alpha=2.0),
    ),
    "sum": (lambda x: torch.sparse.sum(x), lambda x: x.sum()),
    "sum in a dtype": (lambda x: torch.sparse.sum(x, dtype=torch.float64), lambda x: x.sum(dtype=torch.float64)),
    "sum along 0": (lambda x: torch.sparse.sum(x, 0), lambda x: x.sum(0)),
    "sum along both": (lambda x: torch.sparse.sum(x, (0, 1)), lambda x: x.sum((0, 1))),
    "sum along 1 in a dtype": (
        lambda x: torch.sparse.sum(x, (1,), dtype=torch.float64),
        lambda x: x.sum(1, dtype=torch.float64),
    ),
    "softmax": (lambda x: torch.sparse.softmax(x, 1), lambda x: x.softmax(1)),
    "softmax in a dtype": (
        lambda x: torch.sparse.softmax(x, 0, dtype=torch.float64),
        lambda x: x.softmax(0, dtype=torch.float64),
    ),
    "log_softmax": (lambda x: torch.sparse.log_softmax(x, 1), lambda x: x.log_softmax(1)),
    "hspmm": (lambda x: torch.hspmm(x, W), lambda x: torch.mm(x, W)),
    "smm": (lambda x: torch.smm(x, W), lambda x: torch.mm(x, W)),
    "sspaddmm": (lambda x: torch.sspaddmm(B, x, W, beta=3), lambda x: torch.addmm(B, x, W, beta=3)),
}


def example(storage: str) -> md.MaskedTensor:
    data = torch.arange(1.0, 13.0).reshape(3, 4).sin()
    return STORAGES[storage](md.masked_tensor(torch.where(MASK, data, torch.nan), MASK)).detach().requires_grad_()


# Each function in one storage, and each storage with one function.
@pytest.mark.parametrize(("name", "storage"), zip(SAME, itertools.cycle(STORAGES), strict=False))
def test_is_the_function_of_its_name(name: str, storage: str) -> None:
    function, same = SAME[name]
    results = []
    for run in (function, same):
        x = example(storage)
        result = run(x)
        result.sum().backward()
        assert isinstance(x.grad, md.MaskedTensor)
        results.append((result.detach(), x.grad))
    for mine, theirs in zip(*results, strict=True):
        assert isinstance(mine, md.MaskedTensor)
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine.get_mask(), theirs.get_mask())
        torch.testing.assert_close(mine.to_tensor(0), theirs.to_tensor(0))


def test_softmax_is_that_of_torch_sparse() -> None:
    """Where nothing is specified torch.sparse counts nothing either."""
    x = example("coo").detach()
    mine = torch.sparse.softmax(x, 1).to_torch_sparse().coalesce()
    theirs = torch.sparse.softmax(x.to_torch_sparse(), 1).coalesce()
    assert torch.equal(mine.indices(), theirs.indices())
    torch.testing.assert_close(mine.values(), theirs.values())


def test_products_of_what_is_stored_stay_sparse() -> None:
    x = example("csr").detach()
    with md.densify("never"):
        assert torch.sparse.mm(x, x.t()).nnz == torch.mm(x, x.t()).nnz
        torch.sparse.mm(x, W)
        assert torch.sparse.softmax(x, 1).nnz == x.nnz


REFUSED: dict[str, tuple[Call, str]] = {
    "mm by means": (
        lambda x: torch.sparse.mm(x, W, "mean"),
        r"torch\.sparse\.mm\(\.\.\., 'mean'\) .* over the products .* \(x\.unsqueeze\(-1\) \* y\)\.mean\(-2\)",
    ),
    "mm by the largest": (lambda x: torch.sparse.mm(x, W, "amax"), r"\(x\.unsqueeze\(-1\) \* y\)\.amax\(-2\)"),
    "spsolve": (
        lambda x: torch.sparse.spsolve(x, torch.ones(3)),
        r"_spsolve is refused.*torch\.sparse.*torch\.linalg\.solve",
    ),
    "spdiags": (
        lambda x: torch.sparse.spdiags(x, torch.tensor([0, 1, 2]), (4, 4)),
        r"_spdiags is refused.*torch\.diag_embed",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("storage", ["dense", "csr"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_says_what_to_write(name: str, storage: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(MaskedSemanticsError, match=message):
        call(example(storage).detach())


def test_what_the_refusal_of_means_says_to_write() -> None:
    x = example("dense").detach()
    kept, columns = MASK[0], slice(0, 1)
    written = (x.unsqueeze(-1) * W).mean(-2)
    products = x.to_tensor(0)[0][kept][:, None] * W[kept]
    torch.testing.assert_close(written[0, columns].to_tensor(0), products.mean(0)[columns])
    assert written.get_mask().tolist() == [[True] * 2, [False] * 2, [True] * 2]
