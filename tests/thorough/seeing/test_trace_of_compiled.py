"""Traces of compiled functions, of compiled modules and of an export."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import masked_dispatch as md
from traced_tensors import MASK, names, some


def doubled_sum(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum(0)


def test_a_compiled_function_runs_uncompiled_and_is_compiled_again_afterwards() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(doubled_sum, backend=backend, fullgraph=True)
    expected = compiled(some())
    with md.trace() as t:
        result = compiled(some())
    assert torch.equal(result, expected)
    assert torch.equal(compiled(some()), expected)
    assert len(graphs) == 1
    assert names(t.calls) == ["aten.mul.Tensor", "aten.sum.dim_IntList"]
    assert "(functions compiled by torch.compile ran uncompiled, so that their calls are seen)" in str(t)


def test_a_compiled_module_is_shown_once() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(3, 2)), backend="eager")
    with md.trace() as t:
        model(some())
    assert [(call.name, call.depth) for call in t.calls] == [
        ("Sequential", 0),
        ("0 (Linear)", 1),
        ("aten.linear.default", 2),
    ]


def test_an_exported_program_is_a_compiled_region() -> None:
    class Exported(nn.Module):
        def forward(self, data: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return md.as_masked_tensor(data, mask).exp().to_tensor(0)

    with md.trace() as t:
        torch.export.export(Exported(), (torch.ones(2, 3), MASK))
    assert [call.kind for call in t.calls] == ["compiled region"]
