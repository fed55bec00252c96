"""Each room of masked_dispatch lists its files in its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from repository import ROOT

PACKAGE = ROOT / "masked_dispatch"
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_file_is_listed(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = [line.split()[0] for line in text.splitlines() if line.partition("  ")[0].endswith((".py", "/"))]
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    assert set(listed) == files | folders
    assert len(listed) == len(set(listed))
