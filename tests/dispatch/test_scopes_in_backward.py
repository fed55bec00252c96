"""What autograd runs later has the meanings that held when it was recorded: checkpoints, and backwards by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from constant_rules import in_thread
from op_registry import registry
from op_registry.authoring import Dense
from op_registry.registry import Overlay

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]
Scope = Callable[[], contextlib.AbstractContextManager[object]]
MASK = torch.tensor([[True, True, False], [True, True, True]])


def leaf() -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(1.0, 7).reshape(2, 3), MASK, requires_grad=True)


def times_three(x: Dense) -> Dense:
    return x.like(x.data * 3)


def overlay_of_exp() -> Overlay:
    overlay = Overlay(registry)
    overlay.replace(aten.exp.default, times_three)
    return overlay


OVERLAY = overlay_of_exp()


def exp_is_times_three() -> contextlib.AbstractContextManager[object]:
    return registry.overlay(OVERLAY)


# --------------------------------------------------------------------------- how a function is computed in backward


class AsOneNode(torch.autograd.Function):
    """A function, computed again in the backward of a node of its own."""

    @staticmethod
    def forward(ctx: Any, fn: Function, x: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x.detach()).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            return None, torch.autograd.grad(ctx.fn(again), again, grad)[0]


class SetUpLater(AsOneNode):
    """The same, in the form that torch.func takes."""

    @staticmethod
    def forward(fn: Function, x: Tensor) -> Tensor:  # type: ignore[override]
        return fn(x.detach()).detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn = inputs[0]
        ctx.save_for_backward(inputs[1])


AGAIN: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "reentrant checkpoint": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
    "autograd function": AsOneNode.apply,
    "with setup_context": SetUpLater.apply,
    "checkpoint in a checkpoint": lambda fn, x: checkpoint(
        lambda x: checkpoint(fn, x, use_reentrant=False), x, use_reentrant=True
    ),
    "with a context of its own": lambda fn, x: checkpoint(
        fn, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())
    ),
}


def under(scope: Scope) -> Callable[[Callable[[], None]], None]:
    def call(work: Callable[[], None]) -> None:
        with scope():
            work()

    return call


WHERE: dict[str, Callable[[Callable[[], None]], None]] = {
    "outside": lambda work: work(),
    "in another scope": under(lambda: md.windows("padding")),
    "in another thread": in_thread,
}


# -------------------------------------------------------------------------------------------------------- overlays


def squared(x: Tensor) -> Tensor:
    return (x.exp() * x.exp()).sum()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("again", AGAIN)
def test_what_is_computed_again_has_the_overlay_of_its_forward(again: str, where: str) -> None:
    x = leaf()
    with exp_is_times_three():
        result = AGAIN[again](squared, x)
    WHERE[where](result.backward)
    assert torch.equal(x.grad, md.masked_tensor(18 * x.get_data().detach(), MASK))


@pytest.mark.parametrize("again", AGAIN)
def test_what_ran_outside_is_computed_again_as_outside(again: str) -> None:
    x, y = leaf(), leaf()
    result = AGAIN[again](squared, x)
    with exp_is_times_three():
        result.backward()
    squared(y).backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("again", AGAIN)
def test_a_scope_that_the_function_opens_itself(again: str) -> None:
    """Its end is remembered, too: what follows it in the function is computed again without it."""

    def both(x: Tensor) -> Tensor:
        with exp_is_times_three():
            first = x.exp()
        return (first * x.exp()).sum()

    x, y = leaf(), leaf()
    AGAIN[again](both, x).backward()
    (3 * y * y.exp()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


# (torch 2.11 leaves a checkpoint that failed to the garbage collector, which finds no hooks.)
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <generator object _checkpoint:pytest.PytestUnraisableExceptionWarning"
)
def test_scopes_are_left_when_a_backward_raises() -> None:
    def fails_the_second_time(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("the second time")
        return squared(x)

    for again in AGAIN.values():
        calls: list[Tensor] = []
        with exp_is_times_three():
            result = again(fails_the_second_time, leaf())
        with pytest.raises(RuntimeError, match="the second time"):
            result.backward()
        assert registry.scope == ()


def test_a_second_derivative_has_the_overlay_too() -> None:
    x = leaf()
    with exp_is_times_three():
        result = checkpoint(squared, x, use_reentrant=False)
    (first,) = torch.autograd.grad(result, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, md.masked_tensor(torch.full((2, 3), 18.0), MASK))


# --------------------------------------------------------------------------------------------------- other scopes


@pytest.mark.parametrize("again", AGAIN)
def test_windows_of_padding(again: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3, padding=1), torch.nn.Conv1d(2, 1, 3, padding=1)).double()
    batch = md.from_lengths(torch.randn(2, 1, 6, dtype=torch.float64), torch.tensor([6, 3]), dim=2)
    found, expected = (batch.detach().requires_grad_() for _ in range(2))
    with md.windows("padding"):
        result = AGAIN[again](lambda x: net(x).square().sum(), found)
        net(expected).square().sum().backward()
    result.backward()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("again", AGAIN)
def test_the_policy_for_dense_storage(again: str) -> None:
    def inverse(x: Tensor) -> Tensor:
        return torch.linalg.inv(x).sum()  # has no sparse form

    x = md.masked_tensor(torch.eye(2) + 1, requires_grad=True)
    with md.densify("always"):
        result = AGAIN[again](lambda x: inverse(x.to_sparse_csr()), x)
    with md.densify("never"):
        result.backward()
        with pytest.raises(md.MaskedSemanticsError, match=r"densify\('never'\)"):
            inverse(x.to_sparse_csr())
    y = x.detach().requires_grad_()
    inverse(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
