"""An environment with the extra `xla`: the running one, if it has torchax, or one that is made in build/ and kept.

Operators compiled by XLA are compared with the CPU there.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clean_environment import CleanEnvironment
from repository import HELPERS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What tests need beside the extra, which the running environment has.
FOR_TESTS = ("pytest", "expecttest", "hypothesis", "numpy", "scipy", "ml-dtypes")


def requirements() -> list[str]:
    """What the extra asks for."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return extras["xla"]


@functools.cache
def python_with_torchax() -> Path:
    """Its Python. Skips the test that asks, with pip's reason, where the extra cannot be installed."""
    if "torchax" in {distribution.name for distribution in importlib.metadata.distributions()}:
        return Path(sys.executable)
    if sys.version_info < (3, 11):
        pytest.skip("torchax and jax need Python 3.11 or newer")
    wanted = requirements()
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    key = hashlib.sha256(repr((wanted, pinned, torch.__version__, sys.version)).encode()).hexdigest()[:12]
    folder = ROOT / "build" / f"xla-{key}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "xla.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one installs
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            installed(folder, wanted, pinned)
            (folder / "installed").touch()
    return folder / "bin" / "python"


def installed(folder: Path, wanted: list[str], pinned: str) -> None:
    """An environment with torch, what tests need, and the requirements."""
    environment = CleanEnvironment(folder, FOR_TESTS)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in pinned.splitlines() if not line.startswith("torch==")))
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install", "--quiet", "--no-input"]
    done = subprocess.run([*pip, "-c", str(constraints), *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr)
        pytest.skip(f"the extra xla ({', '.join(wanted)}) cannot be installed: {reason[-300:]}")


def run_with_torchax(*arguments: str, where: Path = HELPERS, timeout: int = 1200) -> subprocess.CompletedProcess[str]:
    """Run that Python, with this checkout."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS)]), "OMP_NUM_THREADS": "1"}
    command = [str(python_with_torchax()), *arguments]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=timeout)


# What raises where plain torchax does not: the gradient of a single row, whose shape torchax changes in nll_loss; and
# broadcasting of three dimensions, in `mode`.
DIFFERENT = {("nn_functional_linear_cross_entropy", "device-gradients"), ("mode", "device")}


def compared_with_the_cpu(*part: str) -> tuple[int, int, str]:
    """How many results and gradients are equal, and what the command says."""
    done = run_with_torchax("-W", "ignore", "-m", "op_registry", "check", "--device", "xla", *part)
    different = set(re.findall(r"^(\w+) (device|device-gradients): ", done.stdout, re.MULTILINE))
    assert different <= DIFFERENT, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.findall(r"^(device|device-gradients) +(\d+) ", done.stdout, re.MULTILINE)
    assert [law for law, _ in found] == ["device", "device-gradients"], done.stdout[-6000:] + done.stderr[-2000:]
    results, gradients = (int(equal) for _, equal in found)
    return results, gradients, done.stdout
