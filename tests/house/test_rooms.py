"""Each room of masked_dispatch lists its files in its docstring; the package itself, whose docstring is for users, in
docs/architecture.md (test_readme.py: the diagram has every room)."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import pytest

import masked_dispatch
from repository import ROOT

PACKAGE = ROOT / "masked_dispatch"
ROOMS = sorted(path.parent for path in PACKAGE.rglob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_file_is_listed(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = [line.split()[0] for line in text.splitlines() if line.partition("  ")[0].endswith((".py", "/"))]
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    assert set(listed) == files | folders
    assert len(listed) == len(set(listed))


def test_the_packages_docstring_is_for_users() -> None:
    text = masked_dispatch.__doc__ or ""
    assert len(text.splitlines()) <= 25
    named = set(re.findall(r"\w+", text)) & set(masked_dispatch.__all__)
    assert named >= {"masked_tensor", "from_nan", "trace", "explain", "densify", "optim", "distributed"}
    assert ".py" not in text
    assert doctest.testmod(masked_dispatch, optionflags=doctest.ELLIPSIS).failed == 0
