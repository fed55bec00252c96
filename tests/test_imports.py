"""The packages import each other one way, and nothing in a circle: read off the sources, functions included."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("masked_dispatch", "op_registry")

# Imports of our own modules inside functions, with the reason: nothing that most programs need may wait for these.
LATE = {
    ("masked_dispatch.explain", "masked_dispatch.call_observer"): "conformance's interpreter is expensive to import",
    (
        "masked_dispatch.storage",
        "masked_dispatch.storage.choice",
    ): "the choice of storage, which most programs never ask for",
    ("op_registry", "op_registry.conformance"): "conformance is expensive to import",
    ("op_registry.explain", "op_registry.conformance"): "conformance is expensive to import",
    ("op_registry.__main__", "op_registry"): "each command imports what it needs",
}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return found


def imports_of(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.ImportFrom | ast.Import, bool]]:
    """Every import statement but those for type checkers, and whether it is inside of a function."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, inside
        yield from imports_of(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def edges() -> Iterator[tuple[str, str, bool]]:
    """(importer, imported, whether inside of a function) for each import of one of our modules by another."""
    known = modules()
    for name, path in known.items():
        for statement, inside in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import):
                targets = [alias.name for alias in statement.names]
            else:
                source = statement.module or ""
                targets = [f"{source}.{a.name}" if f"{source}.{a.name}" in known else source for a in statement.names]
            for target in targets:
                if target in known and target != name:
                    yield name, target, inside


def test_no_module_is_part_of_a_circle() -> None:
    # A package's __init__ gathers what its modules offer: it is left out as an importer of theirs, not as imported.
    graph: dict[str, set[str]] = {}
    for importer, imported, _ in edges():
        if not imported.startswith(f"{importer}."):
            graph.setdefault(importer, set()).add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def test_what_operators_mean_knows_no_tensor_subclass() -> None:
    upward = [(a, b) for a, b, _ in edges() if a.startswith("op_registry") and b.startswith("masked_dispatch")]
    assert upward == []


def test_imports_inside_of_functions_are_named_with_their_reason() -> None:
    late = {(importer, imported) for importer, imported, inside in edges() if inside}
    named = {
        (a, b): next((key for key in LATE if a == key[0] and f"{b}.".startswith(f"{key[1]}.")), None) for a, b in late
    }
    assert [pair for pair, key in named.items() if key is None] == []
    assert set(LATE) == set(named.values()), "some of these are no longer there"
