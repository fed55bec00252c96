"""Assignments to plain tensors in a graph: what is said while it is traced, and the mode that it is guarded on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from compiled_regions import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def holes(**options: Any) -> Any:
    return md.masked_tensor(torch.ones(2, 2), torch.tensor([[True, False], [True, True]])).requires_grad_(**options)


def assigned(x: Tensor) -> Tensor:
    written = torch.zeros(2, 2)
    written.copy_(x)
    return written * 2


def of(found: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [w for w in found if w.category is md.MaskDroppedWarning]


def test_a_graph_warns_while_it_is_traced_at_the_line_that_assigns(warned: Any) -> None:
    function, backend = compiled(assigned)
    for _ in range(2):
        result = function(holes(requires_grad=False))
    assert torch.equal(result, torch.tensor([[2.0, 0.0], [2.0, 2.0]]))
    assert [(w.filename, w.lineno) for w in of(warned)] == [(__file__, assigned.__code__.co_firstlineno + 2)]
    assert backend.graphs == 1


def test_a_mask_that_is_stored_counts_as_partly_invalid_and_no_mask_does_not(warned: Any) -> None:
    compiled(assigned)[0](md.as_masked_tensor(torch.ones(2, 2)))
    assert of(warned) == []
    compiled(assigned)[0](md.masked_tensor(torch.ones(2, 2), torch.ones(2, 2) > 0))
    assert len(of(warned)) == 1


@pytest.mark.parametrize("storage", [torch.strided, torch.sparse_csr])
def test_a_graph_is_guarded_on_the_mode(storage: Any, warned: Any) -> None:
    x = holes(requires_grad=False).to_layout(storage)
    function, backend = compiled(assigned, fullgraph=False)
    with md.updates("silent"):
        function(x)
        function(x)
    assert (of(warned), backend.graphs) == ([], 1)
    with md.updates("refuse"), pytest.raises(md.MaskedSemanticsError, match=r"updates\('refuse'\)"):
        function(x)
    function(x)
    assert len(of(warned)) == 1
    with md.updates("silent"):
        function(x)
    assert len(of(warned)) == 1


@pytest.mark.parametrize("mode", ["silent", "refuse"])
def test_backward_of_a_graph_may_run_outside_of_its_block(mode: Any) -> None:
    function, _ = compiled(lambda x: (x * 2).sin())
    x = holes(requires_grad=True)
    with md.updates(mode):
        y = function(x)
    y.sum().backward()
    assert type(x.grad) is md.MaskedTensor
    assert not x.grad.get_mask()[0, 1]


@pytest.mark.parametrize(
    "update",
    [
        lambda o, g: o.add_(g, alpha=2.0),
        lambda o, g: o.add_(g, alpha=torch.tensor(2.0)),
        lambda o, g: o.addcmul_(g, g, value=0.5),
        lambda o, g: o.addcdiv_(g, g, value=0.5),
        lambda o, g: o.lerp_(g, 0.5),
    ],
)
def test_arithmetic_in_place_is_no_assignment_though_dynamo_writes_it_as_one(update: Any) -> None:
    run, _ = compiled(lambda o, g: update(o, g) * 2)
    with md.updates("refuse"):
        found = run(torch.ones(2, 2), holes(requires_grad=False))
        assert torch.equal(found, update(torch.ones(2, 2), holes(requires_grad=False)) * 2)
