"""``python -m benchmarks.device`` without a GPU: every part runs, and both files are written."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.device import __main__ as command
from benchmarks.device import laws
from benchmarks.device.functions import FUNCTIONS
from benchmarks.device.part import kinds_missing
from repository import ROOT


@pytest.mark.parametrize(("device", "seconds"), [("reference", 120), ("cpu", 450)])
def test_every_part_finds_something_without_a_gpu(device: str, seconds: int, tmp_path: Path) -> None:
    """On the device written in Python, that none of the forty functions waits."""
    started = time.monotonic()
    line = [sys.executable, "-m", "benchmarks.device", "--device", device, "--seconds", str(seconds)]
    done = subprocess.run([*line, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, cwd=ROOT)
    parts = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["parts"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < seconds + 12 * len(parts)  # and what starting and ending processes takes
    assert list(parts) == [part.name for part in command.PARTS]
    page = (tmp_path / "found.md").read_text(encoding="utf-8")
    for part in command.PARTS:
        assert f"## {part.title}" in page
        assert not any("wrong" in row or "failed" in row for row in parts[part.name]["rows"])
        kinds = importlib.import_module(f"benchmarks.device.{part.name}").KINDS
        assert kinds_missing(kinds, parts[part.name]["rows"]) == []
    if device == "reference":
        assert parts["waits"]["summary"].startswith(f"0 of {len(FUNCTIONS)} functions wait")


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
