"""The tests' own house: a folder for each room of the packages, files of one subject, helpers in one place.

What takes longer lies in tests/thorough and tests/slow, with a folder for each room too.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from repository import HELPERS, ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
# A file is a chapter (CONTRIBUTING.md): lines of code, without blank ones, comments and docstrings.
MOST_LINES = 400

# The folders of folders: what is collected when it is asked for by name alone.
TIERS = ("thorough", "slow")

# Folders that are not named after a room, and what is in them.
OTHERS = {
    "house": "tests of the repository: imports, texts, benchmarks, examples, what is assumed of torch",
    "helpers": "modules that tests import, and files that they run in another process",
    "rules": "tests of op_registry/ops, named after its families",
}


def rooms() -> set[str]:
    """What lies at the top of the packages: folders, and modules that stand alone."""
    return {
        path.stem
        for package in ("masked_dispatch", "op_registry")
        for path in (ROOT / package).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def below_tier(file: Path) -> tuple[str, ...]:
    """Folder and name of a file, without the tier that it is in."""
    parts = file.relative_to(TESTS).parts
    return parts[1:] if parts[0] in TIERS else parts


def test_every_folder_is_named_after_a_room() -> None:
    folders = {below_tier(file)[0] for file in FILES if len(below_tier(file)) > 1}
    assert folders - set(OTHERS) <= rooms(), "name the folder after a room, or list it here"
    assert set(OTHERS) <= folders
    assert not set(OTHERS) & rooms()


def test_folders_hold_files_and_no_folders() -> None:
    assert [file for file in FILES if len(below_tier(file)) > 2] == []
    assert [file for file in FILES if len(below_tier(file)) == 1 and file.parent != TESTS] == []
    assert [file.name for file in FILES if file.parent == TESTS] == ["conftest.py"]


def test_no_folder_is_a_package() -> None:
    """pytest imports a file by its name alone, so that helpers are found by theirs."""
    assert [file for file in FILES if file.name == "__init__.py"] == []
    names = Counter(file.name for file in FILES if file.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_tiers_are_collected_by_name_alone(pytestconfig: pytest.Config) -> None:
    assert set(TIERS) <= set(pytestconfig.getini("norecursedirs"))
    assert [folder for folder in TESTS.rglob("*") if folder.name in TIERS and folder.parent != TESTS] == []


def test_tests_and_helpers_are_where_they_belong() -> None:
    tests = {file for file in FILES if file.name.startswith("test_")}
    assert [file for file in tests if file.parent == HELPERS] == []
    assert [file for file in FILES if file.parent != HELPERS and file not in tests and file.name != "conftest.py"] == []


def lines_of_code(file: Path) -> int:
    """How many lines of a file are neither blank nor a comment nor part of a docstring."""
    text = file.read_text(encoding="utf-8")
    lines = dict(enumerate(map(str.strip, text.splitlines()), 1))
    if len(lines) <= MOST_LINES:
        return len(lines)  # short enough in any case
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            said.update(range(node.lineno, node.end_lineno + 1))  # type: ignore[operator]
    return sum(bool(line) and line[0] != "#" and number not in said for number, line in lines.items())


def test_no_file_is_too_long() -> None:
    packages = [file for package in ("masked_dispatch", "op_registry") for file in (ROOT / package).rglob("*.py")]
    lengths = {str(file.relative_to(ROOT)): lines_of_code(file) for file in [*FILES, *packages]}
    assert {file: n for file, n in lengths.items() if n > MOST_LINES} == {}, "split it by subject"
