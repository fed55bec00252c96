"""Compiled training: optimizer steps, checkpoints, compiled autograd, autocast, and regions of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from compiled_regions import check, compiled, copies, masked, same, x_and_weight

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# ----------------------------------------------------------------------------------------- training: steps, checkpoints


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"foreach": True}),
    ],
)
def test_compiled_optimizer_steps(optimizer: Any, options: dict[str, Any]) -> None:
    start, weight = masked(), torch.randn(6, 6)
    results = []
    for compile_step in (False, True):
        parameter = start.detach().clone().requires_grad_(True)
        w = weight.clone().requires_grad_(True)
        steps = optimizer([parameter, w], lr=0.1, **options)
        step = torch.compile(steps.step, backend="aot_eager") if compile_step else steps.step
        for _ in range(3):
            steps.zero_grad()
            (parameter @ w).tanh().mean().backward()
            step()
        results.append((parameter.detach(), w.detach()))
    same(*results)
    assert_close(results[0][0].get_mask(), start.get_mask())


@pytest.mark.parametrize("how", ["eager", "reentrant", "compiled"])
def test_checkpoint(how: str) -> None:
    layer = nn.Linear(6, 6)

    def inner(x: Tensor) -> Tensor:
        return nn.functional.gelu(layer(x)).softmax(-1)

    def region(x: Tensor) -> Tensor:
        return checkpoint(inner, x, use_reentrant=how == "reentrant").mean()

    run = compiled(region)[0] if how == "compiled" else region
    x = masked(requires_grad=True)
    gradients = []
    for function in (run, lambda x: inner(x).mean()):
        layer.zero_grad()
        y = x.detach().clone().requires_grad_(True)
        function(y).backward()
        gradients.append((y.grad, layer.weight.grad, layer.bias.grad))
    same(*gradients)


def test_nested_compile_region() -> None:
    @torch.compiler.nested_compile_region
    def inner(x: Tensor) -> Tensor:
        return x.exp().mean(-1)

    check(lambda x, w: inner(x) + inner(x @ w), x_and_weight)


def test_a_user_s_autograd_function() -> None:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].exp()

    check(lambda x, w: Exp.apply(x).mean(-1), x_and_weight)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd(inside: bool) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (x.exp()[:, :6] @ w).softmax(-1).mean()

    start = x_and_weight()
    x, w = copies(start)
    loss(x, w).backward()
    y, v = copies(start)
    if inside:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda: loss(y, v).backward(), backend="aot_eager")()
    else:
        value = loss(y, v)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            value.backward()
    same((y.grad, v.grad), (x.grad, w.grad))


def test_autocast_in_a_region() -> None:
    def region(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = nn.functional.linear(x, w)
            return y, y.float().softmax(-1)

    run, _ = compiled(region)
    x, w = masked(), torch.randn(6, 6)
    a, b = run(x, w), region(x, w)
    assert [t.dtype for t in a] == [t.dtype for t in b] == [torch.bfloat16, torch.float32]
    same(a, b)


def test_inference_mode() -> None:
    run, _ = compiled(lambda x, w: (x @ w).softmax(-1))
    x, w = masked(), torch.randn(6, 6)
    with torch.inference_mode():
        same(run(x, w), (x @ w).softmax(-1))
        y = x * 2
        y[0] = 1.0
        same(run(y, w), (y @ w).softmax(-1))
