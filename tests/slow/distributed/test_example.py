"""examples/distributed, launched as a person launches it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from repository import ROOT


def results(folder: Path, processes: int) -> tuple[dict[str, Any], str]:
    """What the program computes on so many processes, and what it prints."""
    file = folder / f"{processes}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "-m", "examples.distributed", "--json", str(file)],
        cwd=ROOT,
        env=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text()), done.stdout


def test_losses_and_weights_are_the_same_on_1_2_and_4_processes(tmp_path: Path) -> None:
    one, printed = results(tmp_path, 1)
    assert "1437 digits, 40% of the pixels missing" in printed
    assert len(one["losses"]) == 50
    assert one["losses"][-1] < 0.8 * one["losses"][0]
    assert one["top"][-1] < one["top"][0]
    for processes in (2, 4):
        found, printed = results(tmp_path, processes)
        had = re.search(rf"{processes} processes, which had ([\d, ]+) valid pixels", printed)
        assert had is not None
        assert len(set(had[1].split(", "))) == processes  # on every rank another number of them
        np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-10)
        for ours, theirs in zip(found["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
        assert found["resumed"] <= 1e-12
