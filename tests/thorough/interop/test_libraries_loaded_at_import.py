"""The import of masked_dispatch in a new process loads no library that tensors are converted to, nor needs NumPy."""

from __future__ import annotations

import subprocess
import sys

import pytest

# torch says so once a process.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, masked_dispatch; "
        "print(*[n for n in ('pandas', 'pyarrow', 'polars', 'xarray', 'scipy', 'tensordict', 'matplotlib') "
        "if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_masked_tensors_are_made_where_numpy_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; import torch, masked_dispatch as md; "
        "assert md.masked_tensor([1., 2.], [True, False]).sum().item() == 1"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
