"""Sums of gradients in compiled code, and zeros that compiled code overwrites."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import masked_dispatch as md
from few_elements import BIG, BIG_ROWS, FIRST, SECOND, T, shown
from few_elements import vector as masked
from op_registry.records import fill


def test_compiled_and_transformed() -> None:
    a, b = masked([1.0, 2, 3, 4], FIRST), masked([10.0, 20, 30, 40], SECOND)
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: md.accumulate(*t), backend="aot_eager", fullgraph=True)
    assert shown(compiled(a, b)) == [11, 2, 30, None]
    rows = md.masked_tensor(torch.stack([a.get_data(), b.get_data()]), torch.stack([FIRST, SECOND]))
    assert shown(md.functional.vmap(md.accumulate)(rows, rows.flip(0))[0]) == [11, 2, 30, None]
    gradient = md.functional.grad(lambda x, y: md.accumulate(x * x, y).sum())(a, b)
    assert shown(gradient) == [2, 4, None, None]


@pytest.mark.xfail(strict=True, reason="compiled autograd writes the engine's sums down as torch.add, like anyone's")
@pytest.mark.filterwarnings("ignore")
def test_gradients_that_meet_in_compiled_autograd() -> None:
    a, b = masked([1.0, 2, 3, 4], FIRST), masked([10.0, 20, 30, 40], SECOND)
    x = masked([1.0, 1, 1, 1], torch.tensor([T, T, T, T]), requires_grad=True)
    y = x * 2
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.autograd.backward([y, y], [a, b])
    assert shown(x.grad) == [22, 4, 60, 0]


def test_what_a_compiled_graph_writes_under_the_mask_does_not_show() -> None:
    """inductor writes to the data of an argument without raising its version; when it compiles, and after."""
    torch.compiler.reset()
    write = torch.compile(lambda t: t.add_(5), backend="inductor")
    weight = torch.randn(512, 512, requires_grad=True)
    for _ in range(2):
        y = F.linear(md.masked_tensor(torch.randn(BIG), BIG_ROWS), weight).detach()
        with torch.no_grad():
            assert fill.known_zero(y._data, y._validity)
            write(y)
            assert bool(y._data[~BIG_ROWS[:, 0]].any())
            assert not fill.known_zero(y._data, y._validity)
