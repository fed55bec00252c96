"""Batches of gradients by torch's older vmap: is_grads_batched, jacobian(vectorize=True), gradcheck."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from compiled_regions import masked, same
from op_registry.records.fill import small_as_large

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "sum": lambda x: x.sum(1),
    "softmax": lambda x: x.softmax(-1),
    "used twice": lambda x: F.layer_norm(x * x + x, (6,)),
    "matmul": lambda x: x @ torch.ones(6, 2),
    "max": lambda x: x.max(1).values,
    "view": lambda x: x[1:, ::2] * 3,
    "cumsum": lambda x: x.cumsum(1),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
# Legacy vmap runs operators without a batching rule on one gradient at a time, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@every_function
@pytest.mark.parametrize("large", [False, True])
def test_a_batch_of_gradients_is_the_gradients(function: Callable[[Tensor], Tensor], large: bool) -> None:
    x, w = masked(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with small_as_large() if large else torch.enable_grad():
        for leaf, y in ((x, function(x)), (w, function(x.detach() * w))):
            result = y.to_tensor(0.0)
            grads = torch.randn(3, *result.shape)
            (batch,) = torch.autograd.grad(result, leaf, grads, is_grads_batched=True, retain_graph=True)
            for found, grad in zip(batch, grads, strict=True):
                same(found, torch.autograd.grad(result, leaf, grad, retain_graph=True)[0])


@every_function
def test_jacobians_are_vectorized(function: Callable[[Tensor], Tensor]) -> None:
    x = masked(4, 6)
    jacobian = torch.autograd.functional.jacobian
    same(jacobian(function, x, vectorize=True), jacobian(function, x))


def test_batches_of_tangents_are_refused() -> None:
    x = masked(4, 6)
    with pytest.raises(md.MaskedSemanticsError, match=r"Use masked_dispatch\.functional\.jacfwd"):
        torch.autograd.functional.jacobian(torch.exp, x, vectorize=True, strategy="forward-mode")
    with pytest.raises(md.MaskedSemanticsError, match=r"Use masked_dispatch\.functional\.jacfwd"):
        torch.autograd.functional.jacobian(lambda w: x * w, torch.ones(6), vectorize=True, strategy="forward-mode")


def test_gradcheck_of_batches() -> None:
    w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(4, 6) > 0.4
    assert torch.autograd.gradcheck(
        lambda w: md.as_masked_tensor(w, mask).softmax(-1).to_tensor(0.0), w, check_batched_grad=True
    )
