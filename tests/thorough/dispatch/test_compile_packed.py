"""torch.compile on packed batches: one graph, forward and backward, however many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import masked_dispatch as md
from packed_batches import CLASSES, B, Block, D, T, heads, plain, same

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WEIGHT, BIAS, TARGET, PLACES = plain(3, D), plain(3, seed=2), plain(B, T, D), plain(T, D)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x + F.linear(F.gelu(F.linear(F.layer_norm(x + PLACES, (D,)), WEIGHT, BIAS)), WEIGHT.mT),
    "heads": lambda x: torch.cat([heads(part).exp().transpose(1, 2).flatten(2) for part in x.split([2, 2], -1)], -1),
    "heads in front": lambda x: heads(x).exp(),
    "loss over classes": lambda x: F.cross_entropy(x.view(-1, D), CLASSES.view(-1)),
    "loss by place": lambda x: F.mse_loss(x, TARGET),
    "pooled": lambda x: x.mean(1),
    "packed inside": lambda x: F.linear(x.to_dense().to_packed(), WEIGHT),
}


def batch(seed: int) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(seed)
    there = torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=generator)
    data = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    x = md.masked_tensor(torch.where(there[..., None], data, torch.nan), there[..., None])
    return x.to_packed().detach().requires_grad_()


def compare(function: Callable[[Tensor], Tensor], policy: str) -> None:
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    with md.densify(policy):
        for seed in range(4):
            x, y = batch(seed), batch(seed)
            found, expected = compiled(x), function(y)
            same(found, expected)
            found.to_tensor(0).sum().backward()
            expected.to_tensor(0).sum().backward()
            same(x.grad, y.grad)
            assert found.storage_layout is expected.storage_layout
            assert x.grad.storage_layout is torch.jagged
    assert backend.frame_count == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_for_every_number_of_rows(name):
    compare(FUNCTIONS[name], "never")


def test_attention_is_dense_inside_of_a_graph():
    torch.manual_seed(3)
    compare(Block(D, 2, causal=True).double().eval(), "auto")


def test_rows_with_a_mask_for_each_feature():
    """What a Linear makes of them has one validity for all features of a row, which tangents have written out."""
    compiled = torch.compile(lambda x: F.linear(x, WEIGHT), fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, y = (md.masked_tensor(t.get_data(), t.get_mask()).to_packed() for t in [batch(seed).to_dense().detach()] * 2)
        found, expected = compiled(x.requires_grad_()), F.linear(y.requires_grad_(), WEIGHT)
        same(found, expected)
        found.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        same(x.grad, y.grad)


def test_a_result_that_the_loss_does_not_depend_on_is_refused_in_backward():
    compiled = torch.compile(lambda x: (x.pow(2).mean(), x * 2), fullgraph=True, backend="aot_eager")
    loss, _ = compiled(batch(0))
    with pytest.raises(md.MaskedSemanticsError, match=r"return y\.detach\(\), or do not return it"):
        loss.backward()
