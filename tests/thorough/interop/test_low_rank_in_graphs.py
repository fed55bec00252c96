"""svd_lowrank and pca_lowrank compiled: refused where a matrix has holes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import masked_dispatch as md
from matrices_with_holes import FUNCTIONS, HOLES


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["svd_lowrank", "pca_lowrank"])
def test_compiled(name: str) -> None:
    run = torch.compile(FUNCTIONS[name], backend="aot_eager")
    x = md.masked_tensor(torch.eye(9) + 1, HOLES["one"]())
    with pytest.raises(Exception, match=f"torch.{name} has no meaning on a partly valid matrix"):
        run(x)
    assert all(md.is_masked_tensor(r) for r in run(md.masked_tensor(torch.eye(9) + 1)))
    assert not any(md.is_masked_tensor(r) for r in run(torch.eye(9) + 1))
