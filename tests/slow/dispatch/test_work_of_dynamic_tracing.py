"""What tracing for any sizes asks torch for: so much at most, and each layer adds no more than the one before."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.dynamic import WIDTH, batch

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def work(kind: str, layers: int) -> Counter[str]:
    """Nodes of the graph, new symbols, and questions about sizes while forward and backward are traced together."""
    found: Counter[str] = Counter()

    def counting(graph: Any, inputs: Any) -> Any:
        found["nodes"] += len(graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def counted(name: str) -> Any:
        original = getattr(ShapeEnv, name)

        def call(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return original(self, *args, **kwargs)

        return patch.object(ShapeEnv, name, call)

    torch.compiler.reset()
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    compiled = torch.compile(encoder, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=counting))
    with counted("create_symbol"), counted("create_unbacked_symint"), counted("evaluate_expr"):
        compiled(batch(kind))
    return found


# Two layers of torch 2.13, with a tenth to spare. (Of a plain batch, they ask 28,300 questions, and have 364 nodes.)
AT_MOST = {"padded": Counter(nodes=630, evaluate_expr=48_000), "packed": Counter(nodes=655, evaluate_expr=24_000)}


@pytest.mark.parametrize("kind", AT_MOST)
def test_two_layers_ask_so_much_and_each_more_adds_no_more_than_the_one_before(kind: str) -> None:
    """(The input of the first needs no gradient, and the result of the last has one that is valid everywhere.)"""
    two, three, four = (work(kind, layers) for layers in (2, 3, 4))
    assert {what: two[what] for what in AT_MOST[kind] if two[what] > AT_MOST[kind][what]} == {}
    assert two["nodes"] < three["nodes"] < four["nodes"]
    for what in four:
        assert four[what] <= 2 * three[what] - two[what], (what, two, three, four)
