"""Pooling and its gradients compiled by inductor, and the one kind that torch compiles for no dynamic shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import masked_dispatch as md
from cases_of_pooling import CASES, Pool, run

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(("n", "pool", "meaning"), CASES)
def test_inductor(n: int, pool: Pool, meaning: str) -> None:
    found, expected = run(torch.compile(pool), n, meaning), run(pool, n, meaning)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.get_mask(), wanted.get_mask())
        assert_close(mine.to_tensor(0), wanted.to_tensor(0))


def backward_fails(x: Any) -> bool:
    """Whether the gradient of fractional pooling, compiled for dynamic shapes, raises."""

    def pool(x: Any) -> Any:
        return F.fractional_max_pool2d(x, 2, output_size=(3, 3))

    torch._dynamo.reset()
    try:
        torch.compile(pool, backend="aot_eager", fullgraph=True, dynamic=True)(x).sum().backward()
    except (IndexError, TypeError):
        return True
    return False


def test_fractional_pooling_of_dynamic_shapes_compiles_where_that_of_any_wrapper_does() -> None:
    """torch 2.13 has no symbols for the sizes of its gradient, of any subclass."""
    data = torch.rand(2, 3, 6, 6)
    wrapper = TwoTensor(data, data.clone()).requires_grad_()
    assert backward_fails(md.masked_tensor(data, data > 0.2, requires_grad=True)) == backward_fails(wrapper)
