"""What the library prints can be printed anywhere: ``PYTHONIOENCODING=ascii`` is what a pipe of an old system has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from repository import ROOT

# Pages and pictures, which are written in UTF-8 or drawn.
OTHER = {
    "masked_dispatch/distributed/extents.py",
    "masked_dispatch/plot.py",
    "masked_dispatch/seeing/trace.py",
    "masked_dispatch/tensor/printing.py",
    "op_registry/report/conformance.py",
}
SOURCES = [p for package in ("masked_dispatch", "op_registry") for p in sorted((ROOT / package).rglob("*.py"))]


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """The strings of a module, but for its docstrings."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    said = {id(node.body[0].value) for node in nodes if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node


def not_ascii(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value!r}"
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if not text.value.isascii()
    ]


def test_texts_have_ascii_letters_alone() -> None:
    found = {str(path.relative_to(ROOT)): not_ascii(path) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines and path not in OTHER} == {}
    assert {path for path in OTHER if not found[path]} == set()


@pytest.mark.parametrize("text", ['f(f"{x} → {y}")', 'x = "a" "…"', 'def f():\n    """Doc."""\n    return "×"'])
def test_such_a_text_is_found(text: str) -> None:
    assert any(not node.value.isascii() for node in texts(ast.parse(text)))
