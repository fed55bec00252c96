"""Compiled queries, refusals, pooling, habits of callers, overlays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing import assert_close

import masked_dispatch as md
from cases_of_pooling import CASES, Pool, run
from compiled_habits import HABITS, PAGE, SLOW, row
from compiled_regions import check, compiled, masked, same
from constant_rules import constant, in_thread
from op_registry import registry
from repository import ROOT

pytestmark = pytest.mark.usefixtures("fresh_compiler")
QUERIES: dict[str, Callable[[Tensor], Any]] = {
    "unique": lambda x: x.unique(),
    "unique with counts": lambda x: x.round().unique(return_inverse=True, return_counts=True),
    "unique unsorted": lambda x: x.round().unique(sorted=False)[:0],
    "unique_consecutive": lambda x: x.round().unique_consecutive(return_inverse=True, return_counts=True),
    "bincount": lambda x: torch.bincount((x > 0).long().reshape(-1)),
    "bincount of weights": lambda x: torch.bincount((x[0] > 0).long(), x[0], minlength=4),
    "used further": lambda x: x.unique().exp().sum() + torch.bincount((x[0] > 0).long()).sum(),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", QUERIES.values(), ids=QUERIES)
def test_queries_are_in_the_graph(function: Callable[[Tensor], Any], dynamic: bool | None) -> None:
    check(lambda x: function(x), lambda: [masked()], dynamic=dynamic)


def test_queries_of_tensors_without_a_stored_mask() -> None:
    for function in QUERIES.values():
        torch._dynamo.reset()
        check(function, lambda: [masked(mask=None)], calls=1)


# Refused while it is traced, and outside unless everything is valid, which is known there.
def low_rank(x: Tensor) -> Tensor:
    return torch.svd_lowrank(x + 0, q=2)[1] * 0


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_refusal_reaches_the_caller_as_it_is(fullgraph: bool) -> None:
    run, _ = compiled(low_rank, fullgraph=fullgraph)
    x = masked(4, 4)
    with pytest.raises(md.MaskedSemanticsError, match="has no meaning on a partly valid matrix"):
        low_rank(x)
    with pytest.raises(md.MaskedSemanticsError, match="has no meaning on a partly valid matrix") as raised:
        run(x)
    assert type(raised.value).__name__ == "MaskedSemanticsError"


def test_what_is_refused_in_a_graph_runs_outside_of_it() -> None:
    x = masked(4, 4, mask=torch.ones(4, 4, dtype=torch.bool))
    run, backend = compiled(lambda x: low_rank(x.exp()).exp(), fullgraph=False)
    same(run(x), low_rank(x.exp()).exp())
    assert backend.graphs > 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_write_that_changes_how_a_mask_is_stored(fullgraph: bool) -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x.sum()

    run, _ = compiled(add, fullgraph=fullgraph)
    x, y = masked(mask=None), masked()
    if fullgraph:
        with pytest.raises(md.MaskedSemanticsError, match="would change how the m"):
            run(x, y)
        return
    x2 = x.clone()
    same(run(x, y), add(x2, y))
    same(x, x2)


def test_an_invalid_value_that_is_asked_for_is_an_invalid_value_error() -> None:
    def ask(x: Tensor) -> Tensor:
        return x.exp() if bool((x > 0)[0, 0]) else x

    x = masked(mask=torch.zeros(4, 6, dtype=torch.bool))
    with pytest.raises(md.InvalidValueError):
        compiled(ask, fullgraph=False)[0](x)


OPTIMIZERS = [md.optim.SGD, md.optim.Adagrad, md.optim.LazyAdam, md.optim.AdamW, md.optim.RMSprop]


@pytest.mark.parametrize("storage", ["dense", "coo", "csr"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_on_masked_gradients_is_left_out_of_graphs(optimizer: Callable[..., Any], storage: str) -> None:
    p = nn.Parameter(torch.randn(4, 6))
    q = nn.Parameter(p.detach().clone())
    steps, by_hand = optimizer([p], lr=0.1), optimizer([q], lr=0.1)

    def train(scale: Tensor) -> Tensor:
        scale = scale * 2
        steps.step()
        return scale + 1

    run = torch.compile(train, backend="aot_eager")
    for _ in range(2):
        grad = masked()
        p.grad = {"dense": grad.to_dense, "coo": grad.to_sparse, "csr": grad.to_sparse_csr}[storage]()
        q.grad = grad
        same(run(torch.ones(2)), torch.full((2,), 3.0))
        by_hand.step()
        same(p, q)


AT_RUN_TIME: dict[str, Callable[..., Any]] = {
    "tensor_split": lambda x, at, start: torch.tensor_split(x, at),
    "tensor_split at masked positions": lambda x, at, start: torch.tensor_split(x, at),
    "narrow": lambda x, at, start: x.narrow(0, start, 3).exp(),
    "both": lambda x, at, start: (*torch.tensor_split(x, at), x.narrow(0, start, 3)),
}


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_positions_known_at_run_time(name: str) -> None:
    function = AT_RUN_TIME[name]
    run, _ = compiled(function)
    for numbers, start in (([2, 4], 2), ([1, 5], 1), ([2, 5], 3)):
        at = torch.tensor(numbers)
        arguments = masked(6), md.masked_tensor(at) if "masked" in name else at, torch.tensor(start)
        same(run(*arguments), function(*arguments))


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_distinct_values_of_a_tensor_without_dimensions(valid, backend):
    x = md.masked_tensor(torch.tensor(3.0), torch.tensor(valid))
    for f in (
        lambda x: x.unique(),
        lambda x: x.unique(return_inverse=True)[0],
        lambda x: x.unique_consecutive(return_counts=True)[1],
        lambda x: x.nonzero(),
        lambda x: x.compressed(),
    ):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(f, fullgraph=True, backend=backend)(x), f(x))


@pytest.mark.parametrize("name", ["torch.fft.rfft", "torch.nn.functional.pad", "dropna"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_refusal_names_the_function_that_was_called(name: str, fullgraph: bool) -> None:
    x = md.from_lengths(torch.ones(3, 8, 4), torch.tensor([8, 5, 3]))
    calls = {
        "torch.fft.rfft": lambda x: torch.fft.rfft(x, dim=1),
        "torch.nn.functional.pad": lambda x: torch.nn.functional.pad(x.mT, (1, 1), mode="reflect"),
        "dropna": lambda x: md.missing.dropna(x, 1),
    }
    with pytest.raises(Exception, match=rf"\b{re.escape(name)}\b") as error:
        torch.compile(calls[name], fullgraph=fullgraph, backend="aot_eager")(x)
    assert isinstance(error.value, md.MaskedSemanticsError) or (name == "dropna" and fullgraph)  # which Dynamo traces


# ------------------------------------------------------------------------------------------------------------ pooling


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


# ------------------------------------------------------------------------------------------------------------- habits


TEXT = (ROOT / "docs/results/compiled.md").read_text("utf-8")


def test_the_page_has_each_habit() -> None:
    assert TEXT.startswith(PAGE)
    assert len(TEXT.removeprefix(PAGE).strip().splitlines()) == len(HABITS) + len(SLOW) + 2


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # Dynamo's, of profilers
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_as_the_page_says(habit: str) -> None:
    assert row(habit) in TEXT.splitlines()


# ----------------------------------------------------------------------------------------------------------- overlays


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
