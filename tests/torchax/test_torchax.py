"""Masked tensors on XLA by torchax: tests that run in processes of their own, in an environment with the extra.

The device is named once for a process; and the extra is large, and not among what `make test` installs.
"""

from __future__ import annotations

import re
import sys

import pytest

import masked_dispatch as md
from masked_dispatch.torchax.internals import CHECKED
from xla_environment import requirements, run_with_torchax


@pytest.mark.parametrize(
    "file", ["tests_on_torchax.py", "tests_of_writes_on_torchax.py", "assumptions_about_torchax.py"]
)
def test_in_an_environment_with_torchax(file: str) -> None:
    done = run_with_torchax("-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", file)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"\n=+ (\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) >= 6


def test_the_extra_names_what_the_library_was_checked_with() -> None:
    assert f"torchax=={CHECKED}; python_version >= '3.11'" in requirements()


@pytest.mark.parametrize("missing", ["torchax", "jax"])
def test_without_torchax_the_extra_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "torchax.interop", raising=False)
    with pytest.raises(ImportError, match=r"need torchax and jax.*pip install 'masked-dispatch\[xla\]'"):
        md.torchax.enable()
