"""Each part of ``python -m benchmarks.device`` comes to every kind of its rows, without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.device import __main__ as command
from benchmarks.device.functions import FUNCTIONS
from benchmarks.device.part import Row, kinds_missing
from repository import ROOT


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("part", [part.name for part in command.PARTS])
def test_a_part_comes_to_every_kind_of_its_rows(part: str, device: str) -> None:
    """On the device written in Python, all of the forty functions are asked whether they wait."""
    kinds = importlib.import_module(f"benchmarks.device.{part}").KINDS
    line = [sys.executable, "-m", "benchmarks.device", "--part", part, "--device", device, "--seconds", "3600"]
    found: list[Row] = []
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            found.append(json.loads(text))
            if not kinds_missing(kinds, found):
                os.killpg(process.pid, signal.SIGKILL)
                break
    assert not [row for row in found if {"wrong", "failed"} & row.keys()]
    assert kinds_missing(kinds, found) == []
    if part == "waits":
        assert sum(row.get("kind") == "functions" for row in found) == len(FUNCTIONS)
