"""The benchmarks' instruments: kernels that compute what they are compared with, ratios within a round, goals."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import conversions, harness, packed, reductions
from benchmarks.kernels import ELEMENTWISE_RESULT, OnePass
from repository import ROOT


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


def test_ratios_are_taken_within_a_round() -> None:
    slow_machine_in_the_second_round = harness.timing([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert slow_machine_in_the_second_round.ratio == 2
    assert slow_machine_in_the_second_round.seconds == 2


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    harness.measure(candidates, rounds=3, at_least=0, warm_up=0)
    assert calls[-9:] == list("abcbcacab")


@pytest.mark.parametrize(
    ("measured", "at_least", "reached"),
    [(2.0, False, True), (2.5, False, False), (2.5, True, True), (1.5, True, False)],
)
def test_a_goal_knows_its_direction(measured: float, at_least: bool, reached: bool) -> None:
    assert harness.Goal("", measured, bound=2.0, at_least=at_least).reached is reached


def test_goals_and_tables_are_written_with_machine_versions_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "printed_tables", [])
    harness.print_table("title", ("", "seconds"), [["a", "1"]], "a note")
    run = json.loads(harness.as_json([harness.Goal("fast", 2.0, 1.5, at_least=True)], ["fill"]))
    assert run["goals"] == [{"promise": "fast", "measured": 2.0, "bound": 1.5, "at_least": True, "reached": True}]
    assert run["tables"] == [{"title": "title", "columns": ["", "seconds"], "rows": [["a", "1"]], "note": "a note"}]
    assert (run["torch"], run["machine"]["threads"]) == (torch.__version__, torch.get_num_threads())
    assert datetime.fromisoformat(run["date"]).tzinfo is not None


@pytest.mark.slow
def test_a_run_is_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "fill.json"
    command = [sys.executable, "-m", "benchmarks", "fill", "--rounds", "3", "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    run = json.loads(file.read_text(encoding="utf-8"))
    assert run["benchmarks"] == ["fill"]
    assert run["torch"] == torch.__version__
    assert datetime.fromisoformat(run["date"]).tzinfo is not None
    assert run["machine"]["threads"] == 1
    assert {goal["promise"] for goal in run["goals"]} >= {"fill 2048², random, 0: times faster than where"}
    assert all(goal["reached"] == (goal["measured"] >= goal["bound"]) for goal in run["goals"])
    (table, goals) = run["tables"]
    assert table["columns"] == ["", "masked_dispatch", "torch.where ×", "masked_fill ×"]
    assert len(table["rows"]) == 8
    assert goals["title"] == "goals"


def test_help_has_an_example_and_the_exit_codes() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert "python -m benchmarks fill --rounds 5 --json fill.json" in help_text
    assert "exit codes: 0 measured" in help_text


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_blocks_of_the_packed_benchmark_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "lengths", lambda: [packed.TIME, 40])
    monkeypatch.setattr(packed, "BATCH", 2)
    calls = packed.candidates(backward=False)
    there = torch.arange(packed.TIME) < torch.tensor(packed.lengths())[:, None]
    rows = calls["rows by hand"]()
    torch.testing.assert_close(calls[packed.PACKED]().to_tensor(0)[there], rows)
    torch.testing.assert_close(calls[packed.PADDED]()[there], rows)
    torch.testing.assert_close(calls[packed.NESTED]().values(), rows)
