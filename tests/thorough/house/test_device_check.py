"""``python -m benchmarks.device`` without a GPU: every part runs, and both files are written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.device import __main__ as command
from repository import ROOT


def checked(
    folder: Path, device: str, seconds: int, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict]]:
    line = [sys.executable, "-m", "benchmarks.device", "--device", device, "--seconds", str(seconds), *options]
    done = subprocess.run([*line, "--json", str(folder / "found.json")], capture_output=True, text=True, cwd=ROOT)
    return done, json.loads((folder / "found.json").read_text(encoding="utf-8"))["parts"]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_every_part_runs_without_a_gpu(device: str, tmp_path: Path) -> None:
    """As far as it comes in this time; on the device written in Python, to the functions that never wait."""
    started = time.monotonic()
    done, parts = checked(tmp_path, device, 45)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < 45 + 12 * len(parts)  # and what starting and ending processes takes
    assert list(parts) == [part.name for part in command.PARTS]
    page = (tmp_path / "found.md").read_text(encoding="utf-8")
    for part in command.PARTS:
        assert f"## {part.title}" in page
        assert not any("wrong" in row or "failed" in row for row in parts[part.name]["rows"])
    if device == "reference":
        _, parts = checked(tmp_path, device, 120, "--part", "waits")
        assert re.match(r"0 of \d+ functions wait", parts["waits"]["summary"])


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
    assert found["summary"].endswith("its process was ended: its time was up")
