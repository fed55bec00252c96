"""Compiled calls follow an extent as eager calls do; a graph guards on what is known, and on no length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_padded_batches import LENGTHS, RIGHT_OR_LEFT, batch, with_mean_joined
from torch import Tensor

import masked_dispatch as md
from compiled_regions import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LONGER = [6, 2, 3, 5, 1]


def same(found: Tensor, expected: Tensor) -> None:
    """Equal extents and masks, close values where these are valid."""
    assert isinstance(found, md.MaskedTensor)
    assert isinstance(expected, md.MaskedTensor)
    assert found.get_mask().tolist() == expected.get_mask().tolist()
    assert (found.extent is None) == (expected.extent is None)
    assert found.extent is None or found.extent.tolist() == expected.extent.tolist()
    torch.testing.assert_close(found.to_tensor(0), expected.to_tensor(0), rtol=1e-12, atol=1e-12)


def check(run: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor], x: md.MaskedTensor) -> None:
    """Results and gradients of a compiled function are those of the function."""
    compiled_leaf, leaf = x.detach().requires_grad_(), x.detach().requires_grad_()
    found, expected = run(compiled_leaf), function(leaf)
    same(found, expected)
    found.tanh().sum().backward()
    expected.tanh().sum().backward()
    torch.testing.assert_close(compiled_leaf.grad.to_tensor(0), leaf.grad.to_tensor(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["features joined", "chomp", "heads", "steps stacked", "sorted"])
def test_a_graph_for_one_batch_serves_others_of_its_size(name: str, side: str) -> None:
    function = RIGHT_OR_LEFT[name]
    run, backend = compiled(function)
    check(run, function, batch(2, side=side)[0])
    check(run, function, batch(2, side=side, lengths=[3, 0, 4, 4])[0])
    assert backend.graphs == 1


def test_a_graph_of_unknown_sizes_serves_every_width() -> None:
    def several(x: Tensor) -> Tensor:
        merged = RIGHT_OR_LEFT["merged and split"](x) + with_mean_joined(x)
        return merged[:, 1:-1] * RIGHT_OR_LEFT["heads"](x)[:, 1:-1, :1]

    run, backend = compiled(several, dynamic=True)
    for lengths in ([5, 2, 0, 3, 6], [6, 2, 9, 3, 5, 1], [7, 10]):  # (no size that is one of the weights')
        check(run, several, batch(2, lengths=lengths)[0])
    assert backend.graphs == 1


def test_another_layout_and_other_dimensions_are_compiled_anew() -> None:
    run, backend = compiled(lambda x: x[:, 1:])
    right, left = batch(2)[0], batch(2, side="left")[0]
    plain = right.without_extent()
    assert run(plain).extent is None
    for graphs, x in enumerate((right, left, md.padded(right, dim=(1, 2))), 2):
        same(run(x), x[:, 1:])
        assert backend.graphs == graphs
    other, _ = batch(2, lengths=[1, 4, 3, 0])
    same(run(other), other[:, 1:])
    assert backend.graphs == 4


def test_what_merges_know_enters_and_leaves_a_graph() -> None:
    merge, back = compiled(lambda x: x.flatten(0, 1) * 2, dynamic=True)
    split, backend = compiled(lambda y, x: y.unflatten(0, (x.shape[0], x.shape[1])).mean(1), dynamic=True)
    for lengths in (LENGTHS, LONGER):
        x, _ = batch(2, lengths=lengths)
        merged = merge(x)
        assert merged._extent.known == x.flatten(0, 1)._extent.known
        same(split(merged, x), (x * 2).mean(1))
    assert (back.graphs, backend.graphs) == (1, 1)


def test_layouts_that_meet_are_an_assertion_of_the_graph() -> None:
    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    run, _ = compiled(added)
    left, _ = batch(2, side="left")
    same(run(left, left * 2), left * 3)
    for other in (batch(2)[0], batch(2, side="left", lengths=[4, 2, 1, 3])[0]):
        with pytest.raises(RuntimeError, match=r"add: two operands have samples at different places along dimension 1"):
            run(left, other)
