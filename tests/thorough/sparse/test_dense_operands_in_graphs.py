"""densify("warn") names a dense product that is read in part of a compiled function, at the line that calls it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import masked_dispatch as md


def test_it_is_named_at_the_line_that_calls_the_compiled_function() -> None:
    x = md.masked_tensor(torch.ones(8, 10), torch.eye(8, 10).bool()).to_sparse_csr()
    a, b = torch.ones(8, 3, requires_grad=True), torch.ones(3, 10)

    @torch.compile(backend="eager")
    def loss(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return (a @ b - x).square().mean()

    with md.densify("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(a, b, x).backward()
    (found,) = caught
    assert (found.category, found.filename) == (md.DensificationWarning, __file__)
    assert str(found.message).startswith("torch.sub reads a dense operand of shape (8, 10)")
