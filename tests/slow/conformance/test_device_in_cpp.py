"""P7 on a device that is written in C++: the whole database, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import device_in_cpp
from findings_on_devices import check_findings
from repository import ROOT


def test_every_operator_gives_on_a_device_in_cpp_what_it_gives_on_the_cpu() -> None:
    command = [sys.executable, str(device_in_cpp.__file__)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    check_findings(device_in_cpp.NAME, done.stdout)
