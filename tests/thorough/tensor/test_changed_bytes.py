"""Files of masked tensors with a changed byte: they are refused, or can be worked with, and no process ends."""

from __future__ import annotations

import subprocess

import pytest

from corrupted_files import KINDS, change_bytes, check_changes


@pytest.fixture(scope="module")
def changed() -> subprocess.CompletedProcess[str]:
    """300 changes of each kind, in one process."""
    return change_bytes(0, 300, *KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_takes_no_process_down(kind: str, changed: subprocess.CompletedProcess[str]) -> None:
    check_changes(kind, changed)
