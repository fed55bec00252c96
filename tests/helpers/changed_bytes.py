"""Runs corrupted_files.py, which changes bytes of saved masked tensors, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from repository import HELPERS

CORRUPTED = HELPERS / "corrupted_files.py"
KINDS = ("dense", "coo", "hybrid", "csr", "csc", "bsr", "bsc", "packed", "padded")


def change_bytes(seed: int, count: int, *kinds: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CORRUPTED), str(seed), str(count), *kinds]
    return subprocess.run(command, capture_output=True, text=True, timeout=3600)


def check_changes(kind: str, done: subprocess.CompletedProcess[str]) -> None:
    """The process got as far as the last change of this kind, and ended well."""
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith(f"all changes of {kind}: ")]
    assert "'refused': " in found
