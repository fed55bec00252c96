"""P7 on other devices: the whole database on the reference device and on meta."""

from __future__ import annotations

import subprocess
import sys

import pytest

from findings_on_devices import check_findings
from op_registry.__main__ import main


def test_every_operator_gives_on_the_reference_device_what_it_gives_on_the_cpu() -> None:
    """In a process of its own, because the device takes a name for the whole process."""
    command = [sys.executable, "-m", "op_registry", "check", "--device", "reference"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    check_findings("reference", done.stdout)


def test_every_operator_gives_on_meta_what_it_gives_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "--device", "meta"])
    said = capsys.readouterr().out
    assert status == 0, said[-6000:]
    check_findings("meta", said)
