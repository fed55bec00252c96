"""Which part of what takes too long as a whole is this commit's turn: ``parts.py NAME N [COMMIT]`` prints K/N.

Drawn by the commit's hash, for each name by itself, so that all parts get their turn however commits land.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys


def drawn(name: str, pieces: int, commit: str) -> str:
    """The part for a commit, numbered from 0."""
    digest = hashlib.sha256(f"{name} {commit}".encode()).digest()
    return f"{int.from_bytes(digest[:8], 'big') % pieces}/{pieces}"


if __name__ == "__main__":
    name, pieces, *commit = sys.argv[1:]
    head = commit or [subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout]
    print(drawn(name, int(pieces), head[0].strip()))
