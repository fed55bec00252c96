"""torch.lobpcg, svd_lowrank and pca_lowrank: refused for a partly valid matrix, torch's own for a valid one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch import MaskedSemanticsError
from storages import STORAGES

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lobpcg": lambda a: torch.lobpcg(a @ a.mT + torch.eye(9), k=1, niter=3),
    "svd_lowrank": lambda a: torch.svd_lowrank(a, q=2),
    "pca_lowrank": lambda a: torch.pca_lowrank(a, q=2),
}
# One hole; a row of holes; holes that leave a valid element in every row and column; nothing.
HOLES: dict[str, Callable[[], torch.Tensor]] = {
    "one": lambda: torch.arange(81).reshape(9, 9) != 80,
    "row": lambda: (torch.arange(9) != 3)[:, None].expand(9, 9),
    "diagonal": lambda: ~torch.eye(9, dtype=torch.bool),
    "all": lambda: torch.zeros(9, 9, dtype=torch.bool),
}


DIRECT: dict[str, Callable[..., Any]] = {**FUNCTIONS, "lobpcg": lambda a: torch.lobpcg(a, k=1)}


@pytest.mark.parametrize("storage", ["dense", "coo", "csr"])
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("name", DIRECT)
def test_a_partly_valid_matrix_is_refused_by_name(name: str, holes: str, storage: str) -> None:
    mask = HOLES[holes]()
    x = STORAGES[storage](md.masked_tensor(torch.where(mask, torch.eye(9) + 1, torch.nan), mask))
    with pytest.raises(MaskedSemanticsError, match=rf"torch\.{name} .*shape \(9, 9\).*x\.to_tensor\(value\)"):
        DIRECT[name](x)
    DIRECT[name](x.to_tensor(0))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("storage", ["dense", "coo"])
def test_a_valid_matrix_gives_what_torch_gives(name: str, storage: str) -> None:
    torch.manual_seed(0)
    plain = torch.randn(9, 9, dtype=torch.float64).float()
    x = STORAGES[storage](md.masked_tensor(plain, torch.ones(9, 9, dtype=torch.bool)))
    results = []
    for operand in (x, plain):
        torch.manual_seed(1)
        results.append(FUNCTIONS[name](operand))
    for mine, theirs in zip(*results, strict=True):
        assert md.is_masked_tensor(mine)
        assert mine.get_mask().all()
        torch.testing.assert_close(mine.get_data(), theirs)


def test_gradients_of_a_valid_matrix() -> None:
    plain = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    x = md.as_masked_tensor(plain.detach(), torch.ones(6, 4, dtype=torch.bool)).requires_grad_()
    for operand in (plain, x):
        torch.manual_seed(1)
        torch.svd_lowrank(operand, q=2)[1].sum().backward()
    torch.testing.assert_close(x.grad.to_tensor(0), plain.grad)


def test_a_mean_with_holes_is_refused_too() -> None:
    mean = md.masked_tensor(torch.ones(1, 9), torch.arange(9)[None] != 2)
    with pytest.raises(MaskedSemanticsError, match=r"svd_lowrank .*shape \(1, 9\)"):
        torch.svd_lowrank(torch.eye(9), q=2, M=mean)
