"""torch.compile on sparse storage and packed batches: one graph, forward and backward, however much is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from compiled_regions import compiled, same
from packed_batches import CLASSES, B, Block, D, T, heads, plain
from storages import BY_NAME as LAYOUTS

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, COLUMNS = 12, 8

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: (x * 2 + 1).sin().exp(),
    "one pattern": lambda x: x * x.exp(),
    "beside dense": lambda x: x * torch.linspace(0.5, 2, COLUMNS),
    "sum": lambda x: x.sum(),
    "mean of rows": lambda x: x.mean(1),
    "amax of columns": lambda x: x.amax(0),
    "var of rows": lambda x: x.var(1, correction=0),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(dim=1),
    "softmax": lambda x: x.softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "transpose": lambda x: x.t() * 2,
    "slice": lambda x: x[2:7].exp(),
    "to csr": lambda x: x.to_sparse_csr().exp(),
    "to coo": lambda x: x.to_sparse().softmax(0),
    "to dense": lambda x: x.to_dense().exp(),
    "product": lambda x: x @ torch.linspace(0, 1, COLUMNS * 2).reshape(COLUMNS, 2),
    "linear": lambda x: F.linear(x, torch.linspace(0, 1, COLUMNS * 3).reshape(3, COLUMNS)),
}


def sparse(layout: str, seed: int, requires_grad: bool = False) -> md.MaskedTensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(ROWS, COLUMNS, generator=generator)
    mask = torch.rand(ROWS, COLUMNS, generator=generator) < 0.2 + 0.15 * seed
    x = md.masked_tensor(data, mask).to_layout(LAYOUTS[layout], blocksize=(2, 2) if layout[0] == "b" else None)
    return x.detach().requires_grad_(requires_grad)


def compare(function: Callable[[Tensor], Any], make: Callable[[int], Any], policy: str = "never") -> None:
    """Compiled once, it gives what it gives eagerly, gradients included, however much is stored."""
    run, backend = compiled(function)
    with md.densify(policy):
        for seed in range(4):
            x, y = make(seed), make(seed)
            found, expected = run(x), function(y)
            same(found, expected)
            assert found.storage_layout is expected.storage_layout
            for result in (found, expected):
                result.to_tensor(0).square().sum().backward()
            same(x.grad, y.grad)
            assert x.grad.storage_layout is y.grad.storage_layout
    assert backend.graphs == 1


# In every layout; the others in two of them.
EVERYWHERE = ("elementwise", "beside dense", "mean of rows", "transpose", "product")


@pytest.mark.parametrize(
    ("layout", "name"),
    [(la, name) for la in LAYOUTS for name in FUNCTIONS if la in ("coo", "csr") or name in EVERYWHERE],
)
def test_one_graph_for_every_number_of_elements(layout, name):
    compare(FUNCTIONS[name], lambda seed: sparse(layout, seed, requires_grad=True))


@pytest.mark.parametrize("layout", ["coo", "csr", "bsc"])
def test_inductor_gives_what_eager_gives(layout):
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (F.layer_norm((x * weight).exp(), (COLUMNS,)).softmax(1) * x).sum().to_tensor(0)

    run = torch.compile(loss, fullgraph=True, backend="inductor")
    for seed in range(2):
        gradients = []
        for function in (loss, run):
            x, weight = sparse(layout, seed, requires_grad=True), torch.ones(COLUMNS, requires_grad=True)
            function(x, weight).backward()
            gradients.append((x.grad, weight.grad))
        same(gradients[1][0], gradients[0][0])
        torch.testing.assert_close(gradients[1][1], gradients[0][1])


def test_different_patterns_meet_in_a_graph():
    run, _ = compiled(lambda x, y: md.accumulate(x, y) * (x + y))
    x, y = sparse("csr", 1), sparse("csr", 3)
    same(run(x, y), md.accumulate(x, y) * (x + y))


def test_dense_becomes_sparse_inside_of_a_graph():
    def make(seed: int) -> Tensor:
        return sparse("coo", seed).to_dense().requires_grad_()

    compare(lambda x: x.to_sparse_csr().softmax(1).to_dense(), make, "auto")


def test_a_line_based_operator_is_stored_densely_in_a_graph():
    x = sparse("csr", 2)
    run, _ = compiled(lambda x: x.sort(1)[0])
    same(run(x), x.sort(1)[0])
    with md.densify("never"), pytest.raises(Exception, match="length of the longest slice is not known while tracing"):
        run(x)  # a graph for another policy is another graph


def test_writing_to_an_argument_is_refused():
    x = sparse("coo", 1)
    with pytest.raises(Exception, match=r"a graph cannot replace what its argument stores\. Return the out-of-place"):
        compiled(lambda x: x.mul_(2))[0](x)
    same(compiled(lambda x: x.clone().mul_(2))[0](x), x * 2)


@pytest.mark.parametrize("kind", ["plain", "dense", "unused"])
def test_a_gradient_that_is_stored_otherwise_is_refused(kind):
    x = sparse("coo", 2, requires_grad=True)
    y, total = compiled(lambda x: (x.exp(), x.sum().to_tensor(0)))[0](x)
    ones = torch.ones(ROWS, COLUMNS)
    backward = {
        "plain": lambda: y.backward(ones),
        "dense": lambda: y.backward(md.masked_tensor(ones, ones > 0)),
        "unused": total.backward,
    }[kind]
    with pytest.raises(md.MaskedSemanticsError, match=r"takes gradients in the layout of its results.*y\.detach"):
        backward()


def test_another_layout_is_another_graph():
    run, backend = compiled(lambda x: x.exp())
    assert run(sparse("coo", 1)).storage_layout is torch.sparse_coo
    assert run(sparse("csr", 1)).storage_layout is torch.sparse_csr
    assert backend.graphs == 2


def test_a_tensor_that_meets_itself_in_pairs_is_one_graph():
    run, backend = compiled(lambda x: x.unsqueeze(1) * x.unsqueeze(0))
    for seed in range(4):
        x = sparse("coo", seed)
        same(run(x), x.unsqueeze(1) * x.unsqueeze(0))
    assert backend.graphs <= 2


def test_what_a_graph_stores_densely_for_producers_and_sums():
    for layout, function in (
        ("csr", lambda x: md.sparse_topk(x, 2)),
        ("bsr", lambda x: md.accumulate(x, x.flip(0))),
    ):
        x = sparse(layout, 0)
        same(compiled(function)[0](x), function(x))


# ----------------------------------------------------------------------------------------------------- packed batches


WEIGHT, BIAS, TARGET, PLACES = plain(3, D), plain(3, seed=2), plain(B, T, D), plain(T, D)

OF_PACKED: dict[str, Callable[[Tensor], Tensor]] = {
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


@pytest.mark.parametrize("name", OF_PACKED)
def test_one_graph_for_every_number_of_rows(name):
    compare(OF_PACKED[name], batch)


def test_attention_is_dense_inside_of_a_graph():
    torch.manual_seed(3)
    compare(Block(D, 2, causal=True).double().eval(), batch, "auto")


def test_rows_with_a_mask_for_each_feature():
    """What a Linear makes of them has one validity for all features of a row, which tangents have written out."""
    run, _ = compiled(lambda x: F.linear(x, WEIGHT))
    for seed in range(3):
        x, y = (md.masked_tensor(t.get_data(), t.get_mask()).to_packed() for t in [batch(seed).to_dense().detach()] * 2)
        found, expected = run(x.requires_grad_()), F.linear(y.requires_grad_(), WEIGHT)
        same(found, expected)
        found.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        same(x.grad, y.grad)


def test_a_result_that_the_loss_does_not_depend_on_is_refused_in_backward():
    run, _ = compiled(lambda x: (x.pow(2).mean(), x * 2))
    loss, _ = run(batch(0))
    with pytest.raises(md.MaskedSemanticsError, match=r"return y\.detach\(\), or do not return it"):
        loss.backward()
