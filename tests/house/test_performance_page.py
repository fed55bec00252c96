"""The performance page is made of what the benchmarks have written, and of nothing else; the page of costs, of it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import costs_page, page
from benchmarks.__main__ import NAMES, QUICK
from repository import ROOT

PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
MACHINE = {"processor": "a processor", "architecture": "x86_64", "capability": "AVX2", "cores": 2, "threads": 1}


def run_of(goals: dict[str, list[tuple[str, float, float, bool]]], date: str = "2026-01-01") -> dict[str, Any]:
    """What a run of the benchmarks leaves: (promise, measured, bound, at_least) of each benchmark."""
    rows = [
        {"benchmark": name, "promise": promise, "measured": measured, "bound": bound, "at_least": at_least}
        for name, of_one in goals.items()
        for promise, measured, bound, at_least in of_one
    ]
    about = {"date": f"{date}T12:00:00+00:00", "torch": "2.13.0", "python": "3.11.0", "machine": MACHINE}
    return {"benchmarks": list(goals), "goals": rows, **about}


RUN = run_of(
    {
        "fill": [("faster than where", 3.0, 2.0, True)],
        "overhead": [("exp", 4.5, 3.0, False), ("neg", 4.0, 5.0, False), ("sum", float("nan"), 6.0, False)],
    }
)


def test_each_goal_stands_beside_its_figure() -> None:
    text = page.page([RUN])
    assert "| exp | ≤ 3 | 4.50 | **no** |" in text
    assert "| neg | ≤ 5 | 4.00 | yes |" in text
    assert "| sum | ≤ 6 | not measured | **no** |" in text
    assert "| faster than where | ≥ 2 | 3.00 | yes |" in text
    assert "`python -m benchmarks overhead`" in text
    assert "Measured on 2026-01-01 with torch 2.13.0" in text
    assert "a processor" in text


def test_the_summary_names_what_is_missed_by_most() -> None:
    text = page.page([RUN])
    assert "| R5: one small eager call | 1 of 3 | sum: not measured (≤ 6) |" in text
    assert "| Eager fills | 1 of 1 | – |" in text


def test_why_goals_are_missed_is_said_while_they_are() -> None:
    assert f"*Missed because:* {page.MISSED['overhead']}" in page.page([RUN])
    assert "Missed" not in page.page([run_of({"overhead": [("neg", 4.0, 5.0, False)]})])
    assert set(page.MISSED) <= set(page.TITLES)


def test_of_two_runs_the_later_one_counts() -> None:
    again = run_of({"fill": [("faster than where", 1.0, 2.0, True)]}, date="2026-02-02")
    text = page.page([RUN, again])
    assert "| faster than where | ≥ 2 | 1.00 | **no** |" in text
    assert "3.00" not in text
    assert "| exp | ≤ 3 | 4.50 | **no** |" in text
    assert "2026-01-01" in text
    assert "2026-02-02" in text


@pytest.mark.parametrize(
    ("measured", "bound", "at_least", "share"),
    [
        (1.0, 2.0, False, 0.5),
        (2.0, 2.0, False, 1.0),
        (1.0, 2.0, True, 2.0),
        (4.0, 2.0, True, 0.5),
        (0.0, 0.0, False, 0.0),
        (1.0, 0.0, False, float("inf")),
    ],
)
def test_a_figure_is_divided_by_its_goal(measured: float, bound: float, at_least: bool, share: float) -> None:
    goal = page.Goal("", measured, bound, at_least)
    assert page.share_of_goal(goal) == share
    assert goal.reached is (share <= 1)


def test_the_command_writes_the_page_and_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, output = tmp_path / "all.json", tmp_path / "performance.md"
    file.write_text(json.dumps(RUN), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["page", str(file), "--output", str(output)])
    page.main()
    first = (tmp_path / "performance.svg").read_bytes()
    assert b"R5: one small eager call" in first
    assert output.read_text(encoding="utf-8") == page.page([RUN])
    page.main()
    assert (tmp_path / "performance.svg").read_bytes() == first
    assert "costs.md is left as it is: no figure of the benchmark training says how long" in capsys.readouterr().err
    assert not (tmp_path / "costs.md").exists()


def test_every_benchmark_has_a_place_on_the_page_and_a_quick_form() -> None:
    assert set(page.TITLES) == set(NAMES)
    assert set(QUICK) == set(NAMES)


def test_the_page_names_benchmarks_that_exist() -> None:
    named = re.findall(r"^`python -m benchmarks (\w+)`$", PERFORMANCE, re.MULTILINE)
    assert named
    assert set(named) <= set(NAMES)


def test_the_page_of_costs_has_the_figures_of_the_performance_page() -> None:
    """``python -m benchmarks.costs_page`` writes it again."""
    assert costs_page.PAGE.read_text(encoding="utf-8") == costs_page.page(PERFORMANCE)


def test_the_page_of_costs_has_the_least_and_the_most_of_its_figures() -> None:
    figures = {"fill": {"a: times": 0.5, "b: times": 1.25, "c": 7.0}}
    of = functools.partial(costs_page.Cost, "a fill", "where", "fill")
    assert costs_page.figure(of(r".*: times"), figures) == "0.50–1.25"
    assert costs_page.figure(of(r".*: times", inverted=True), figures) == "0.80–2.0"
    with pytest.raises(ValueError, match="no figure of the benchmark fill says how long 'a fill' takes"):
        costs_page.figure(of(r".*: seconds"), figures)


def test_the_page_says_of_missed_goals_what_is_written_here() -> None:
    for part in PERFORMANCE.split("\n## ")[1:]:
        (name,) = re.findall(r"^`python -m benchmarks (\w+)`$", part, re.MULTILINE)
        missed = page.MISSED.get(name, "") if "| **no** |" in part else ""
        assert re.findall(r"^\*Missed because:\* (.*)$", part, re.MULTILINE) == ([missed] if missed else [])
    assert PERFORMANCE.startswith(page.INTRODUCTION.partition("{runs}")[0])
