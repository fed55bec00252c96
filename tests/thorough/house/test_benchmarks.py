"""Benchmarks run, and say what docs say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks import (
    conversions,
    crossovers,
    eager_reductions,
    graphs,
    harness,
    masked_mean,
    overhead,
    packed,
    reductions,
)
from benchmarks.kernels import ELEMENTWISE_RESULT, OnePass
from repository import ROOT


def test_ratios_are_taken_within_a_round() -> None:
    slow_machine_in_the_second_round = harness.timing([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert slow_machine_in_the_second_round.ratio == 2
    assert slow_machine_in_the_second_round.seconds == 2


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    harness.measure(candidates, rounds=3, at_least=0, warm_up=0)
    assert calls[-9:] == list("abcbcacab")


def test_goals_and_tables_are_written_with_machine_versions_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "printed_tables", [])
    harness.print_table("title", ("", "seconds"), [["a", "1"]], "a note")
    run = json.loads(harness.as_json({"fill": [harness.Goal("fast", 2.0, 1.5, at_least=True)]}, {"fill": 1.25}))
    assert run["goals"] == [
        {"benchmark": "fill", "promise": "fast", "measured": 2.0, "bound": 1.5, "at_least": True, "reached": True}
    ]
    assert run["seconds"] == {"fill": 1.2}
    assert run["tables"] == [{"title": "title", "columns": ["", "seconds"], "rows": [["a", "1"]], "note": "a note"}]
    assert (run["torch"], run["machine"]["threads"]) == (torch.__version__, torch.get_num_threads())
    assert datetime.fromisoformat(run["date"]).tzinfo is not None


def test_what_could_not_be_measured_is_not_reached() -> None:
    assert not harness.Goal("", float("nan"), bound=2.0).reached
    assert not harness.Goal("", float("nan"), bound=2.0, at_least=True).reached


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
def test_conversions_that_are_compared_give_the_same() -> None:
    for call in conversions.candidates(32, 0.3).values():  # ours are checked there
        assert call() is not None
    mine, torchs = (
        conversions.converted(conversions.some_tensor(32, 0.3, whose), "csr") for whose in ("masked_dispatch", "torch")
    )
    assert [p.nbytes for p in conversions.pieces(mine)] == [p.nbytes for p in conversions.pieces(torchs)]


@pytest.fixture
def small_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "BATCH", 2)
    monkeypatch.setattr(packed, "TIME", 64)
    monkeypatch.setattr(packed, "lengths", lambda: [64, 40])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("small_packed")
@pytest.mark.parametrize("backward", [False, True])
def test_the_blocks_of_the_packed_benchmark_compute_the_same(backward: bool) -> None:
    calls = packed.candidates(backward)
    packed.check(calls)
    (first, *rest) = packed.rows_of(calls[packed.NESTED]())
    with pytest.raises(AssertionError, match="packed: "):
        packed.check({packed.BY_HAND: calls[packed.BY_HAND], packed.PACKED: lambda: [first * 1.01, *rest]})


def test_sparse_layouts_are_compared_with_what_dense_storage_gives() -> None:
    x = crossovers.tensor(64, 0.3, "elements")
    right = x.sum(-1)
    crossovers.check(x.to_sparse_csr().sum(-1), right, "sum")
    with pytest.raises(AssertionError, match=r"^sum: "):
        crossovers.check(x.amax(-1), right, "sum")
    with pytest.raises(AssertionError, match="valid elsewhere"):
        crossovers.check(md.masked_tensor(right.to_tensor(0), torch.zeros(64, dtype=torch.bool)), right, "sum")


def test_a_crossover_is_the_least_or_the_greatest_density_where_one_side_always_wins() -> None:
    assert crossovers.in_words(0.0, (0.1, 0.9)) == "dense"
    assert crossovers.in_words(0.9, (0.1, 0.9)) == "sparse"
    assert crossovers.in_words(0.25, (0.1, 0.9)) == "25.0%"


@pytest.mark.parametrize("kind", ["random", "rows"])
@pytest.mark.parametrize("way", eager_reductions.WAYS)
def test_eager_reductions_compute_what_the_line_by_hand_computes(way: str, kind: str) -> None:
    for name in reductions.MASKED:
        given = eager_reductions.case(name, 16, kind)
        eager_reductions.check(name, eager_reductions.WAYS[way](name, given), given.mask)
    calls = eager_reductions.forward("sum", given)
    with pytest.raises(AssertionError, match=r"\('sum', 'remembered'\)"):
        eager_reductions.check("sum", calls | {eager_reductions.HAND: lambda: given.data.sum(-1) + 1}, given.mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*:UserWarning:torch.masked")
@pytest.mark.parametrize("name", overhead.CALLS)
def test_small_calls_compute_the_same_on_each_kind_of_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"plain", "masked_dispatch"} <= set(overhead.candidates(name, requires_grad=True))
    _, *rest = overhead.CALLS[name]
    calls = iter((torch.neg, torch.clone))  # the second one is called on plain tensors
    monkeypatch.setitem(overhead.CALLS, name, (lambda x, y: next(calls)(x), *rest))
    with pytest.raises(AssertionError, match="masked_dispatch: "):
        overhead.check(name, "masked_dispatch", *overhead.operands("masked_dispatch", False, False))


def test_the_masked_mean_is_the_same_in_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_mean, "SIZE", (4, 8, 16))
    eager = {name: make() for name, make in masked_mean.steps().items() if masked_mean.COMPILED not in name}
    losses, mask = torch.randn(masked_mean.SIZE), torch.rand(masked_mean.SIZE) < 0.5
    calls = {name: (lambda step=step: step(losses, mask)) for name, step in eager.items()}
    assert len(calls) == 4
    masked_mean.check(calls, eager[masked_mean.WHERE](losses.double(), mask))
    with pytest.raises(AssertionError, match="wrong: "):
        masked_mean.check({"wrong": lambda: (losses.mean(), losses)}, eager[masked_mean.WHERE](losses.double(), mask))


def test_kernels_are_counted_in_what_the_compiler_writes() -> None:
    code = "async_compile = AsyncCompile()\ncpp_fused_sum_0 = async_compile.cpp_pybinding(['const float*'], source)\n"
    assert len(graphs.KERNEL.findall(code * 2 + "async_compile.wait(globals())")) == 2


# ------------------------------------------------------------------------------------------------- those that compile


@pytest.mark.parametrize("name", reductions.BY_HAND)
def test_one_pass_kernels_compute_what_they_are_compared_with(name: str) -> None:
    torch.manual_seed(0)
    x, m = torch.randn(7, 67), torch.rand(7, 67) < 0.5
    reference = x.double().requires_grad_()
    expected = reductions.BY_HAND[name](reference, m)
    g = torch.randn(expected.shape)
    (gradient,) = torch.autograd.grad(expected, reference, g.double())

    kernel = OnePass(name, torch.where(m, x, torch.nan), m.to(torch.int8))

    def same(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b.detach().float(), rtol=1e-5, atol=1e-5)

    same(kernel.forward(), expected)
    same(kernel.forward_backward(g), gradient)
    assert kernel.out.shape == (x.shape if name in ELEMENTWISE_RESULT else x.shape[:1])


def test_help_has_an_example_and_the_exit_codes() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert "python -m benchmarks fill --rounds 5 --json fill.json" in help_text
    assert "exit codes: 0 measured" in help_text


def test_graphs_breaks_and_recompiles_are_counted() -> None:
    torch.compiler.reset()
    once = torch.compile(lambda x: x.sin() + 1, backend="eager")
    assert graphs.counted(once, [torch.ones(3)] * 3) == graphs.Graphs(graphs=1, breaks=0, recompiles=0, kernels=0)

    def breaking(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1

    found = graphs.counted(torch.compile(breaking, backend="eager"), [torch.ones(3), torch.ones(4)])
    assert found == graphs.Graphs(graphs=2, breaks=1, recompiles=2, kernels=0)


def test_the_peak_of_a_conversion_is_measured_in_a_process_of_its_own() -> None:
    assert conversions.extra_memory("masked_dispatch", "csr", 64, 0.5) >= 0
