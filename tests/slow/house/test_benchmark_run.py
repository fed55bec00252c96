"""A benchmark run as a person runs it, and written as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from repository import ROOT


def test_a_run_is_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "fill.json"
    command = [sys.executable, "-m", "benchmarks", "fill", "--rounds", "3", "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    run = json.loads(file.read_text(encoding="utf-8"))
    assert run["benchmarks"] == ["fill"]
    assert run["machine"]["threads"] == 1
    assert {goal["promise"] for goal in run["goals"]} >= {"fill 2048², random, 0: times faster than where"}
    assert all(goal["reached"] == (goal["measured"] >= goal["bound"]) for goal in run["goals"])
    (table,) = run["tables"]
    assert table["columns"] == ["", "masked_dispatch", "torch.where ×", "masked_fill ×"]
    assert len(table["rows"]) == 8
