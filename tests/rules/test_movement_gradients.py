"""Gradients of indexing, scatters, joins and movement on bare records: exact, and blind to what is under the mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from bare_records import apply, plain
from op_registry.authoring import Dense
from op_registry.records.dense import map_tensors

aten = torch.ops.aten
nan, inf = math.nan, math.inf
T, F = True, False


# ----------------------------------------------------------------------------------------------------------- gradients

x_mask = tensor([[T, F, T], [F, F, T], [T, T, T], [F, T, F]])
s_mask = tensor([[T, T, F], [F, T, T]])
at = tensor([[0, 1, 2], [0, 1, 3]])
at_mask = tensor([[T, T, T], [T, F, T]])
line = Dense(tensor([2, 0]), tensor([T, T]))
broken_line = Dense(tensor([2, 77]), tensor([T, F]))

DIFFERENTIABLE: dict[str, Any] = {
    "index_put": lambda x, s: apply(aten.index_put.default, x, [broken_line], s),
    "index_put-accumulate": lambda x, s: apply(aten.index_put.default, x, [line], s, True),
    "index_copy": lambda x, s: apply(aten.index_copy.default, x, 0, broken_line, s),
    "index_add": lambda x, s: apply(aten.index_add.default, x, 0, broken_line, s, alpha=2),
    "scatter": lambda x, s: apply(aten.scatter.src, x, 0, Dense(at, at_mask), s),
    "scatter_add": lambda x, s: apply(aten.scatter_add.default, x, 0, Dense(at, at_mask), s),
    "put": lambda x, s: apply(aten.put.default, x, Dense(at, at_mask), s, True),
    "select_scatter": lambda x, s: apply(aten.select_scatter.default, x, apply(aten.select.int, s, 0, 1), 0, 2),
    "slice_scatter": lambda x, s: apply(aten.slice_scatter.default, x, s, 0, 1, 3),
    "cat": lambda x, s: apply(aten.cat.default, [x, s, x]),
    "copy": lambda x, s: apply(aten.copy.default, x, apply(aten.select.int, s, 0, 0)),
    "where": lambda x, s: apply(aten.where.self, plain([[T], [F], [T], [F]]), x, apply(aten.select.int, s, 0, 0)),
    "gather": lambda x, s: apply(aten.gather.default, x, 0, Dense(at, at_mask)),
    "index": lambda x, s: apply(aten.index.Tensor, x, [broken_line, plain([0, 2])]),
    "masked_select": lambda x, s: apply(aten.masked_select.default, x, plain([T, F, T])),
    "prod": lambda x, s: apply(aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "prod"),
    "mean": lambda x, s: apply(aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "mean"),
    "mean-without-self": lambda x, s: apply(
        aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "mean", include_self=False
    ),
    "amax": lambda x, s: apply(aten.scatter_reduce.two, x, 0, Dense(at, at_mask), s, "amax"),
    "index_reduce": lambda x, s: apply(aten.index_reduce.default, x, 0, broken_line, s, "amin"),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_exact_and_blind_to_what_is_hidden(name):
    f = DIFFERENTIABLE[name]
    generator = torch.Generator().manual_seed(5)
    x0 = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    s0 = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def loss(x: Tensor, s: Tensor, garbage: float) -> Tensor:
        # What the tensor does at its boundary: the gradient is masked, what lies under the mask is anything.
        hidden_x = torch.where(x_mask, x, torch.full_like(x, garbage))
        hidden_s = torch.where(s_mask, s, torch.full_like(s, garbage))
        out = f(Dense(hidden_x, x_mask.to(torch.int8)), Dense(hidden_s, s_mask.to(torch.int8)))
        return (out.filled(0.5) ** 3).sum()

    x, s = x0.clone().requires_grad_(), s0.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, s: loss(x, s, nan), (x, s))
    assert torch.autograd.gradgradcheck(lambda x, s: loss(x, s, nan), (x, s))
    seen = []
    for garbage in (nan, inf, -1e38, 2.0):
        # The gradient at the stored data itself: plain operands and valid elements get the same, bit for bit.
        data = torch.where(x_mask, x0, garbage).requires_grad_()
        source = torch.where(s_mask, s0, garbage).requires_grad_()
        value = (f(Dense(data, x_mask), Dense(source, s_mask)).filled(0.5) ** 3).sum()
        grads = torch.autograd.grad(value, (data, source), allow_unused=True, materialize_grads=True)
        seen.append([value, torch.where(x_mask, grads[0], 0), torch.where(s_mask, grads[1], 0)])
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    assert all(t.isfinite().all() for t in map_tensors(lambda t: t, seen[0], Tensor))


@pytest.mark.parametrize("name", ["index_put", "scatter_add", "cat", "where", "gather", "mean"])
def test_forward_mode_and_vmap(name):
    f = DIFFERENTIABLE[name]
    x, s = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)

    def run(x: Tensor, s: Tensor) -> Tensor:
        return f(Dense(x, x_mask.to(torch.int8)), Dense(s, s_mask.to(torch.int8))).filled(0)

    if name != "mean":
        _, tangent = torch.func.jvp(run, (x, s), (torch.ones_like(x), torch.ones_like(s)))
        assert torch.equal(tangent, torch.func.jvp(run, (x + 1, s + 1), (torch.ones_like(x), torch.ones_like(s)))[1])
    batched = torch.func.vmap(run)(torch.stack([x, x + 1]), torch.stack([s, s + 1]))
    torch.testing.assert_close(batched[1], run(x + 1, s + 1))
