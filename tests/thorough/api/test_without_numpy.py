"""Masked tensors are made where NumPy is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_numpy_is_not_imported_for_it() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; import torch, masked_dispatch as md; "
        "assert md.masked_tensor([1., 2.], [True, False]).sum().item() == 1"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
