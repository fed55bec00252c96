"""The gradients of pooling in compiled code: sizes as inductor takes them, and inductor itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing import assert_close

from cases_of_pooling import CASES, Pool, run

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def sizes_in(graph: torch.fx.GraphModule) -> list[list[int]]:
    """The lists of numbers that pooling operators of a graph are given, but those of whole shapes."""
    nodes = [node for node in graph.graph.nodes if "pool" in str(node.target) and "adaptive" not in str(node.target)]
    return [list(a) for node in nodes for a in node.args if isinstance(a, (list, tuple)) and a]


@pytest.mark.parametrize(("n", "pool", "meaning"), CASES)
def test_a_graph_has_the_sizes_of_each_dimension(n: int, pool: Pool, meaning: str) -> None:
    """inductor's gradient of an average takes no single number for all dimensions."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    compiled = torch.compile(pool, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    found, expected = run(compiled, n, meaning), run(pool, n, meaning)
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine.get_mask(), wanted.get_mask())
        assert_close(mine.to_tensor(0), wanted.to_tensor(0))
    assert len(graphs) == 2
    spatial = (n, n + 1)  # torch pools a line as a plane of height 1
    assert {len(sizes) for graph in graphs for sizes in sizes_in(graph)} <= set(spatial if n == 1 else (n,))
