"""tests_on_reference_device.py, in a process for each device: a process can name a kind of its own only once."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import device_in_cpp
from repository import HELPERS

DEVICES = ["reference", pytest.param(device_in_cpp.NAME, marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", DEVICES)
def test_masked_tensors_on_a_device_whose_backward_has_a_thread_of_its_own(device: str) -> None:
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
    environment = os.environ | {"TESTED_DEVICE": device}
    done = subprocess.run(command, cwd=HELPERS, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"\n=+ (\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 20
