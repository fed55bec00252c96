"""A fresh virtual environment with torch and what torch itself needs, and nothing else: a user's machine."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement


def closure_of(distribution: str) -> set[str]:
    """A distribution and everything that it requires here, without extras."""
    found: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        requirements = [Requirement(text) for text in required]
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


class CleanEnvironment:
    """An environment in `folder`, with links to the torch of the running one, and to other distributions if named."""

    def __init__(self, folder: Path, also: Sequence[str] = ()) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for name in set().union(*map(closure_of, ("torch", *also))):
            for file in metadata.files(name) or []:
                top = file.parts[0]
                if top not in ("..", "__pycache__") and not (self.packages / top).exists():
                    (self.packages / top).symlink_to(metadata.distribution(name).locate_file(top))

    def install(self, wheel: Path) -> None:
        """Install a wheel, whose requirements have to be there."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-index", "--quiet"]
        subprocess.run([*command, str(wheel)], check=True)

    def run(self, *arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
        """Run its Python in the folder `where`, without this checkout."""
        hidden = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        hidden["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy"  # torch's own, where there is no NumPy
        return subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, cwd=where, env=hidden, check=False
        )
