"""Compiled functions with plain results whose size depends on values."""

from __future__ import annotations

import pytest
import torch

from reported_operands import X, masked


@pytest.mark.parametrize(
    "positions",
    [
        torch.argwhere,
        torch.nonzero,
        lambda x: torch.repeat_interleave(x.isnan().logical_not().long().reshape(-1)),
    ],
    ids=["argwhere", "nonzero", "repeat_interleave"],
)
def test_plain_results_whose_size_only_the_graph_knows_compile(positions):
    x = masked(X)
    compiled = torch.compile(positions, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(x), positions(x))
