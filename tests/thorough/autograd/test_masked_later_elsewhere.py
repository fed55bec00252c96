"""A mask that is given later, under transforms and compilers: where it is as good as before, and where it is not.

docs/recipes/nan-gradients.md names the limits, each with a way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

pytestmark = pytest.mark.filterwarnings("ignore")

LATER = torch.tensor([False, True])
X = torch.tensor([0.0, 2.0])
RIGHT, NAN = [0.0, 0.5], [torch.nan, 0.5]


def everywhere(x: Tensor) -> Any:
    return md.as_masked_tensor(x, torch.ones(x.shape, dtype=torch.bool))


def logarithm(x: Tensor) -> Tensor:
    return everywhere(x).log().mask_with(LATER).to_tensor(0)


def loss(x: Tensor) -> Tensor:
    return logarithm(x).sum()


def same(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)


def apart(x: Any) -> tuple[Any, Any]:
    return x.std(1), x.mean(1)


@pytest.mark.parametrize("both", [lambda x: torch.std_mean(x, 1), apart])
def test_two_results_of_one_call_share_a_formula(both: Callable[[Any], tuple[Any, Any]]) -> None:
    """So where one is masked later, the other's gradient may be NaN; of two calls it is not."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    std, mean = both(md.as_masked_tensor(x, torch.tensor([[True, False], [True, True]])))
    (std.mask_with(LATER).sum() + mean.sum()).backward()
    assert x.grad is not None
    half = 2**-0.5
    same(x.grad, [[1.0 if both is apart else torch.nan, 0.0], [0.5 - half, 0.5 + half]])


@pytest.mark.parametrize(
    "jacobian",
    [
        md.functional.jacfwd(logarithm),
        md.functional.vmap(md.functional.jacfwd(logarithm)),
        lambda x: torch.autograd.functional.jacobian(logarithm, x),
        lambda x: torch.autograd.functional.jacobian(logarithm, x, vectorize=True),
    ],
    ids=["jacfwd", "vmap of jacfwd", "jacobian", "jacobian, vectorized"],
)
def test_forward_mode_and_batches_of_gradients(jacobian: Callable[[Tensor], Tensor], request: Any) -> None:
    mapped = "vmap" in request.node.name
    found = jacobian(X.expand(3, 2).clone())[1] if mapped else jacobian(X)
    same(found, [[0.0, 0.0], RIGHT])


def test_jvp() -> None:
    _, tangent = md.functional.jvp(loss, (X,), (torch.ones(2),))
    same(tangent, 0.5)


@pytest.mark.parametrize(
    "gradient",
    [
        md.functional.grad(loss),
        lambda x: md.functional.vjp(loss, x)[1](torch.tensor(1.0))[0],
        lambda x: md.functional.jacrev(logarithm)(x)[1],
        lambda x: md.functional.vmap(md.functional.grad(loss))(x[None])[0],
    ],
    ids=["grad", "vjp", "jacrev", "vmap of grad"],
)
def test_reverse_mode_of_transforms_needs_the_mask_before(gradient: Callable[[Tensor], Tensor]) -> None:
    same(gradient(X), NAN)


def test_the_ways_out_of_transforms() -> None:
    before = md.functional.grad(lambda x: everywhere(x).mask_with(LATER).log().sum())
    same(before(X), RIGHT)
    same(md.functional.vmap(before)(X.expand(3, 2))[1], RIGHT)
    rows = X.expand(3, 2).clone().requires_grad_()
    (each,) = torch.autograd.grad(everywhere(rows).log().mask_with(LATER.expand(3, 2)).sum(), rows)
    same(each[1], RIGHT)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def gradient_of(function: Callable[[Tensor], Any]) -> Tensor:
    x = X.clone().requires_grad_()
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_both_in_one_region() -> None:
    same(gradient_of(compiled(logarithm)), RIGHT)


def test_a_plain_operand_in_a_region() -> None:
    ones = md.masked_tensor(torch.ones(2), torch.ones(2, dtype=torch.bool))
    quotient = compiled(lambda w: (ones / w).mask_with(LATER).to_tensor(0))
    same(gradient_of(quotient), [0.0, -0.25])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: compiled(lambda x: x.log())(everywhere(x)).mask_with(LATER),
        lambda x: compiled(lambda x: everywhere(x).log())(x).mask_with(LATER),
        lambda x: compiled(lambda y: y.mask_with(LATER))(everywhere(x).log()),
    ],
    ids=["the mask outside", "the mask outside, masked inside", "the operator outside"],
)
def test_across_the_edge_of_a_region_the_mask_has_to_come_before(function: Callable[[Tensor], Any]) -> None:
    same(gradient_of(function), NAN)


def test_before_the_edge_of_a_region() -> None:
    same(gradient_of(lambda x: compiled(lambda y: y.log())(everywhere(x).mask_with(LATER))), RIGHT)


def test_compiled_autograd_needs_the_mask_before() -> None:
    def backward(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = X.clone().requires_grad_()
        value = function(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            value.backward()
        assert x.grad is not None
        return x.grad

    same(backward(loss), NAN)
    same(backward(lambda x: everywhere(x).mask_with(LATER).log().sum().to_tensor(0)), RIGHT)


def test_compiled_autograd_of_a_region_that_calls_backward() -> None:
    x = X.clone().requires_grad_()
    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss(x).backward(), backend="aot_eager")()
    assert x.grad is not None
    same(x.grad, RIGHT)
