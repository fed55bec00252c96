"""A compiled function has the meanings of the thread and the overlay that it is called in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from constant_rules import constant, in_thread
from op_registry import registry

aten = torch.ops.aten


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_compiled_function_follows_the_overlay_of_its_caller(made_inside: bool) -> None:
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    def region(data: Tensor, mask: Tensor) -> Tensor:
        return (md.as_masked_tensor(data, mask) if made_inside else data).exp().to_tensor(0.0)

    torch.compiler.reset()
    run = torch.compile(region, backend=backend, fullgraph=True)
    mask = torch.tensor([True, False])
    data = torch.zeros(2) if made_inside else md.masked_tensor(torch.zeros(2), mask)

    def called() -> list[float]:
        return run(data, mask).tolist()

    assert called() == [1, 0]
    with registry.overlay() as mine:
        mine.replace(aten.exp.default, constant(42))
        assert called() == [42, 0]
        assert in_thread(called) == [1, 0]
    assert called() == [1, 0]
    for value in (7.0, 8.0):  # one function, closed over another number
        with registry.overlay() as mine:
            mine.replace(aten.exp.default, constant(value))
            assert called() == [value, 0]
    assert graphs == 4
