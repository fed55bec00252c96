"""Functions that produce sparse storage from plain data, in compiled regions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from data_of_producers import data


@pytest.mark.parametrize(
    "produce",
    [md.sparse_relu, lambda x: md.sparse_threshold(x, 0.5), lambda x: md.sparse_topk(x, 2)],
    ids=["relu", "threshold", "topk"],
)
def test_in_a_compiled_region(produce):
    def total(x: Tensor) -> Tensor:
        return (produce(x) * 2).sum(1).to_tensor(0)

    x = data().requires_grad_()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, total(x))
    (gradient,) = torch.autograd.grad(compiled.sum(), x)
    (expected,) = torch.autograd.grad(total(x).sum(), x)
    assert torch.equal(gradient, expected)
