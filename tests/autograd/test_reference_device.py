"""tests_on_reference_device.py in a process of its own: a process can name its own kind of device only once."""

from __future__ import annotations

import re
import subprocess
import sys

from repository import HELPERS


def test_masked_tensors_on_a_device_whose_backward_has_a_thread_of_its_own() -> None:
    pytest = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [*pytest, "tests_on_reference_device.py"]
    done = subprocess.run(command, cwd=HELPERS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\n=+ \d+ passed in ", done.stdout), done.stdout[-2000:]
