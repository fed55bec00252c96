"""Peak memory of a call, as Linux counts what is resident: in a process of its own, so that nothing hides a part."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# An allocator that gives back what is freed, at once: what it kept of an earlier call would hide part of the peak.
GIVING_BACK = "glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=65536"


def peak_of_process(module: str, *arguments: str, allocator: str | None = None) -> float:
    """What ``python -m module arguments`` prints last: the MiB that a call allocates at most."""
    environment = os.environ if allocator is None else os.environ | {"GLIBC_TUNABLES": allocator}
    command = [sys.executable, "-m", module, *arguments]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()[-1]
    )


def peak_of_call(call: Callable[[], object]) -> float:
    """MiB: resident memory of this process at its highest during a call, less what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(which: str) -> float:
    """Resident memory of this process in MiB, as Linux has it: "VmRSS" now, "VmHWM" at its highest."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{which}:")[2].split()[0]) / 1024
