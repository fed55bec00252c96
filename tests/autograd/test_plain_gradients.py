"""P5 for gradients that no rule makes: the `.grad` of a plain leaf is plain, zero where nothing contributed.

A backward that a user has written with masked tensors, masked roots of `torch.autograd.backward` and hooks give the
engine masked gradients of plain tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masked_dispatch as md

T, F = True, False
MASK = torch.tensor([[T, F, T], [F, F, T]])


class HandWrittenLinear(torch.autograd.Function):
    """x @ w, and its derivative as a user writes it for plain tensors."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad @ w.t(), x.t() @ grad


def masked(requires_grad: bool = False, seed: int = 0) -> md.MaskedTensor:
    data = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    return md.masked_tensor(torch.where(MASK, data, torch.nan), MASK, requires_grad=requires_grad)


def weight_like(kind: str) -> Tensor:
    """A plain leaf of shape (3, 2) in memory of some kind."""
    values = torch.arange(6.0).view(3, 2)
    if kind == "transposed":
        return values.t().contiguous().t().requires_grad_()
    if kind == "with gaps":
        return torch.zeros(3, 4)[:, ::2].copy_(values).detach().requires_grad_()
    return torch.nn.Parameter(values) if kind == "parameter" else values.requires_grad_()


@pytest.mark.parametrize("kind", ["tensor", "parameter", "transposed", "with gaps"])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_hand_written_backward(kind: str, create_graph: bool, calls: int) -> None:
    x, w = masked(requires_grad=True), weight_like(kind)
    for _ in range(calls):
        HandWrittenLinear.apply(x, w).sum().backward(create_graph=create_graph)
    wanted = calls * x.detach().to_tensor(0).sum(0)[:, None].expand(3, 2)
    assert type(w.grad) is Tensor
    torch.testing.assert_close(w.grad.detach(), wanted)
    assert w.grad[1].tolist() == [0, 0]  # no valid element reads this row
    assert isinstance(x.grad, md.MaskedTensor)


@pytest.mark.parametrize("function", ["leaf", "product", "matmul"])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
def test_masked_roots(function: str, create_graph: bool, calls: int) -> None:
    p = torch.arange(6.0).view(2, 3).requires_grad_()
    for _ in range(calls):
        root = {"leaf": lambda: p, "product": lambda: p * 2, "matmul": lambda: p @ torch.eye(3)}[function]()
        torch.autograd.backward([root], [masked()], create_graph=create_graph)
    wanted = calls * (2 if function == "product" else 1) * masked().to_tensor(0)
    assert type(p.grad) is Tensor
    torch.testing.assert_close(p.grad.detach(), wanted)


def test_a_hook_that_masks() -> None:
    p = torch.ones(2, 3, requires_grad=True)
    p.register_hook(lambda grad: md.as_masked_tensor(grad, MASK))
    (p * 2).sum().backward()
    assert type(p.grad) is Tensor
    assert torch.equal(p.grad, 2.0 * MASK)


def test_code_of_hooks_keeps_its_masks() -> None:
    p, x = torch.ones(2, 3, requires_grad=True), masked()
    seen: list[Tensor] = []
    p.register_post_accumulate_grad_hook(lambda _: seen.extend([x.detach(), x.clone()]))
    (p * 2).sum().backward()
    assert len(seen) == 2
    assert all(isinstance(tensor, md.MaskedTensor) for tensor in seen)


def test_a_leaf_shared_by_rules_and_a_hand_written_backward() -> None:
    x, w = masked(), weight_like("tensor")
    (HandWrittenLinear.apply(x, w).sum() + (x @ w).sum()).backward()
    assert type(w.grad) is Tensor
    torch.testing.assert_close(w.grad, 2 * x.to_tensor(0).sum(0)[:, None].expand(3, 2))


# -------------------------------------------------------------------------------------- what the engine hands over


class PlainBackward(HandWrittenLinear):
    """The same, with a gradient of `w` that it makes plain itself."""

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        of_x, of_w = HandWrittenLinear.backward(ctx, grad)
        return of_x, of_w.to_tensor(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("retained", [False, True], ids=["autograd.grad", "retain_grad"])
def test_a_gradient_that_is_not_of_a_leaf(retained: bool) -> None:
    """What a backward by hand gives for a plain tensor is plain, whoever makes it so."""

    def gradient(function: type[HandWrittenLinear]) -> Tensor:
        leaf = weight_like("tensor")
        w = leaf * 1 if retained else leaf
        loss = function.apply(masked(), w).sum()
        if not retained:
            return torch.autograd.grad(loss, w)[0]
        w.retain_grad()
        loss.backward()
        return w.grad

    by_hand, plain = gradient(HandWrittenLinear), gradient(PlainBackward)
    assert type(by_hand) is type(plain) is Tensor
    assert torch.equal(by_hand, plain)


def test_gradients_by_rules_are_plain_however_they_are_asked_for() -> None:
    leaf = weight_like("tensor")
    w = leaf * 1
    w.retain_grad()
    loss = (masked() @ w).sum()
    loss.backward(retain_graph=True)
    assert type(w.grad) is type(leaf.grad) is Tensor
    w.grad = None  # to which torch.autograd.grad adds, too
    (asked,) = torch.autograd.grad(loss, w)
    assert type(asked) is Tensor
    assert torch.equal(asked, leaf.grad)
