"""``python -m benchmarks.device`` without a GPU: every part runs, and both files are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device import __main__ as command
from benchmarks.device import laws
from repository import ROOT


def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    """As far as it comes in this time: nothing is wrong but that a part came to nothing."""
    line = [sys.executable, "-m", "benchmarks.device", "--device", "reference", "--seconds", "45"]
    done = subprocess.run([*line, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, cwd=ROOT)
    parts = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["parts"]
    assert list(parts) == [part.name for part in command.PARTS]
    page = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert all(f"## {part.title}" in page for part in command.PARTS)
    wrong = [row["wrong"] for found in parts.values() for row in found["rows"] if "wrong" in row]
    assert all("NOTHING was found in its time" in each for each in wrong), done.stdout + done.stderr
    assert done.returncode == int(wrong != [])


def test_a_part_that_comes_to_nothing_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the part's name, and what it did not come to; what failed is no figure, and a missing library says so."""
    some = tmp_path / "some"
    rates, failed = {"what": "copying", "kind": "rates"}, {"what": "R4", "kind": "R4", "failed": "ValueError"}
    missing = {"what": "R14 BERT", "kind": "R14", "not asked": "transformers is not installed"}
    some.write_text("#!/bin/sh\n" + "".join(f"echo '{json.dumps(row)}'\n" for row in (rates, failed, missing)))
    some.chmod(0o755)
    monkeypatch.setattr(command, "PARTS", tuple(part for part in command.PARTS if part.name == "times"))
    monkeypatch.setattr(command.sys, "executable", str(some))
    files = ["--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["benchmarks.device", "--device", "cpu", "--seconds", "20", *files])
    assert command.main() == 1
    nothing = "part times: NOTHING was found in its time of R10, R4, R1, R2, R15: give more --seconds"
    assert f"    the part itself: {nothing}\n" in capsys.readouterr().out
    assert nothing in (tmp_path / "found.md").read_text(encoding="utf-8")

    monkeypatch.setattr(laws, "rows", lambda device, until: iter([{"what": "all entries", "entries": 700}]))
    assert command.run_part("laws", "cpu", 1.0) == 1
    assert capsys.readouterr().err == "part laws: NOTHING was found in its time of operators: give more --seconds\n"


def test_a_device_that_is_missing_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.device", "--device", "xpu"])
    assert command.main() == 0
    assert capsys.readouterr().out.startswith("nothing was checked: no device xpu on this machine (")


def test_a_part_that_dies_is_wrong_and_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does one that takes too long."""
    monkeypatch.setattr(command, "GRACE", 0.2)
    monkeypatch.setattr(command.sys, "executable", "false")
    found = command.rows_of(command.PARTS[3], "cpu", 20)
    assert found["rows"][0]["wrong"].startswith("it failed")
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    slow.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(slow))
    found = command.rows_of(command.PARTS[3], "cpu", 1)
    assert found["seconds"] < 20
    assert found["rows"][0]["wrong"].startswith("part waits: NOTHING was found in its time of functions, calls")
    assert found["summary"].endswith("its process was ended: its time was up")
