"""Python code run in a fresh process in which this library cannot be imported, as where a model is served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

# -S leaves out what installs packages in editable form; the finder refuses those that lie beside torch.
REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("masked_dispatch", "op_registry"):
            raise ModuleNotFoundError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
"""


def run_without_library(code: str, *arguments: str, folder: Path) -> str:
    """What `code` prints, run in `folder` with `arguments` in sys.argv[1:]; fails with its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(Path(torch.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", REFUSING + code, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
