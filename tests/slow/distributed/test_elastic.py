"""A job that torchrun restarts after SIGKILL loses the step in flight, and ends as an undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from repository import HELPERS, ROOT

# Without the last, torchrun (2.13) gives restarted processes the store of those before, where gloo may find addresses
# at which nobody is left ("Connection refused"): with plain tensors too.
SETTINGS = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def result_of(folder: Path, kind: str, killed_in: int) -> dict[str, Any]:
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(HELPERS / "elastic_training.py"), str(folder), kind, str(killed_in)]
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", *program],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "result").read_text())


@pytest.mark.parametrize("kind", ["masked", "plain"])
def test_a_killed_rank_costs_the_step_in_flight(kind: str, tmp_path: Path) -> None:
    killed = result_of(tmp_path / "killed", kind, 4)
    undisturbed = result_of(tmp_path / "undisturbed", kind, 0)
    assert (tmp_path / "killed" / "killed").exists()
    assert (killed["began"], undisturbed["began"]) == (3, 0)
    assert killed["weight"] == undisturbed["weight"]
