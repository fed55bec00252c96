"""Writes to masked tensors of torchax tensors, and views of them; run as tests_on_torchax.py is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchax.interop import jax_jit

import masked_dispatch as md
from torchax_samples import IGNORED, MASK, on_cpu, on_jax, same
from torchax_samples import in_environment as in_environment

pytestmark = IGNORED


def adding(x: Any) -> Any:
    x.add_(1).mul_(x)
    return x


def filling(x: Any) -> Any:
    x.masked_fill_(x > 2, 0.5).clamp_(min=0.75)
    x[0].detach()
    return x.zero_()


def assigning_a_row(x: Any) -> Any:
    x[1] = 7.0
    return x


def assigning_masked(x: Any) -> Any:
    x[:2, 1:3] = x[1:, :2] * 2
    return x


def assigning_by_tensors(x: Any) -> Any:
    x[torch.tensor([0, 2]).to(x.device), 1] = torch.tensor([5.0, 6.0]).to(x.device)
    x[x > 2] = -1.0
    return x


def assigning_leading_ones(x: Any) -> Any:
    x[..., 0] = torch.ones(1, 1, 3).to(x.device)
    x[None, 2, :] = x[None, 2, :] + 1
    return x


def writing_to_what_is_detached(x: Any) -> Any:
    x.detach().mul_(2)
    x.data.add_(1)
    return x


def writing_out(x: Any) -> Any:
    torch.mul(x, 3, out=x)
    return torch.add(x, x, out=md.masked_tensor(torch.zeros(3, 4), MASK).to(x.device))


WRITES = [
    adding,
    filling,
    assigning_a_row,
    assigning_masked,
    assigning_by_tensors,
    assigning_leading_ones,
    writing_to_what_is_detached,
    writing_out,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_writes_to_a_tensor_do_what_they_do_on_the_cpu(write: Callable[[Any], Any]) -> None:
    same(write(on_jax()), write(on_cpu()))
    if write is not assigning_by_tensors:
        same(jax_jit(write)(on_jax()), write(on_cpu()))


def test_the_gradient_passes_an_assignment() -> None:
    def gradient(x: Any, row: Any) -> Any:
        x, row = x.detach().requires_grad_(), row.detach().requires_grad_()
        y = x * 2
        y[1] = row
        return torch.autograd.grad((y * y).sum().to_tensor(0.0), (x, row))

    for mine, theirs in zip(gradient(on_jax(), on_jax()[0]), gradient(on_cpu(), on_cpu()[0]), strict=True):
        same(mine, theirs)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "[]": lambda x: x[0],
    "transpose": lambda x: x.T,
    "view": lambda x: x.view(-1),
    "expand": lambda x: x[:1].expand(3, 4),
    "split": lambda x: x.split(2)[0],
    "a view of a view": lambda x: x[1:][0],
    "detach of a view": lambda x: x[0].detach(),
}
LOST = (
    r"a write to a view of shape \([\d, ]+\) of a masked tensor on jax:0: jax arrays have no views; this view is a "
    r"copy, and its base would not change. Assign to the base, x\[index\] = value \(x\[index\] = x\[index\] \+ 1 for "
    r"x\[index\] \+= 1\), or use the operator that returns a tensor."
)
STALE = (
    r"a view of shape \([\d, ]+\) of a masked tensor on jax:0 is read after its base was written to: jax arrays have "
    r"no views, and this view is a copy of the old values. Take the view after the write, or take a copy, "
    r"view.clone\(\), before it."
)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_write_through_a_view_is_refused(name: str, compiled: bool) -> None:
    def write(x: Any) -> Any:
        VIEWS[name](x).mul_(5)
        return x

    x = on_jax()
    with pytest.raises(md.MaskedSemanticsError, match=LOST):
        (jax_jit(write) if compiled else write)(x)
    same(x, on_cpu())


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_not_read_after_a_write_to_its_base(name: str) -> None:
    x = on_jax()
    view, copied = VIEWS[name](x), VIEWS[name](x).clone()
    x.add_(1)
    with pytest.raises(md.MaskedSemanticsError, match=STALE):
        view + 1
    same(copied, VIEWS[name](on_cpu()))
    same(VIEWS[name](x), VIEWS[name](on_cpu() + 1))


def test_backward_notices_that_what_it_needs_was_overwritten() -> None:
    x, y = on_jax().requires_grad_(), on_jax()
    exponential = x.exp()
    loss = exponential.sum().to_tensor(0.0)
    exponential.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    product = (x * y).sum().to_tensor(0.0)  # needs a filled copy of y
    y.add_(1)
    product.backward()
    same(x.grad, on_cpu())


def test_plain_tensors_are_updated_where_valid() -> None:
    for device in ("jax", "cpu"):
        table = torch.zeros(3, 4).to(device)
        table.add_(on_cpu().to(device))
        assert table.cpu().equal(on_cpu().to_tensor(0.0))
