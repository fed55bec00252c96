"""Run tests_on_reference_device.py in a process of its own: a process can name a kind of device only once."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from repository import HELPERS, ROOT


def run_on_device(device: str) -> None:
    """Fails with what pytest said if a test fails, or if there are few."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "tests_on_reference_device.py",
    ]
    environment = os.environ | {"TESTED_DEVICE": device, "PYTHONPATH": str(ROOT)}  # (benchmarks are not installed)
    done = subprocess.run(command, cwd=HELPERS, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"\n=+ (\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 20
