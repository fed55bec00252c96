"""The house: rooms on floors, imports downward only, nothing in a circle. Read off the sources, functions included."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from op_registry import authoring
from repository import ROOT

# Rooms from the ground up: a module imports from its own room and from those before it.
FLOORS = {
    "op_registry": (
        ("errors", "digests", "older_torch", "progress", "schema", "workers", "dimensions"),
        ("traits",),
        ("rule",),
        ("records", "registration", "registry"),
        ("autocast", "bound", "resolve"),
        ("sparse",),
        ("laws",),
        ("extents",),
        ("authoring",),
        ("ops",),
        ("windows",),
        ("conformance",),
        ("report", "testing", "fuzz"),
        ("__main__",),
    ),
    "masked_dispatch": (
        ("process", "replacements"),
        ("compiler_internals", "densification", "distributed_internals", "versions"),
        ("engine_internals", "torch_internals"),
        ("scopes", "callers"),
        ("policies",),
        ("tensor",),
        ("autograd",),
        ("interop",),
        ("dispatch",),
        ("api",),
        ("distributed", "functional", "metrics", "missing", "optim", "plot", "seeing", "testing", "torchax"),
        ("assumptions", "conformance_subject"),
        ("command_line",),
        ("__main__",),
    ),
}

# Imports inside functions, none of our own modules, by the reason why they wait.
REASONS = {
    "the core depends on torch alone": (
        "matplotlib jax jax.core jax.tree_util torchax torchax.interop numpy pandas pytest tqdm"
    ),
    "Python 3.10 does not have it": "tomllib",
    "loads the compiler": (
        "torch._dynamo torch._dynamo.comptime torch._dynamo.exc torch._dynamo.source torch._dynamo.utils "
        "torch._dynamo.variables torch._dynamo.variables.builder torch._dynamo.variables.tensor functorch.compile "
        "torch._functorch._aot_autograd torch._functorch._aot_autograd.runtime_wrappers "
        "torch._functorch._aot_autograd.schemas torch._higher_order_ops torch._inductor "
        "torch._inductor.inductor_prims torch._inductor.ir torch._guards torch.fx.experimental.proxy_tensor "
        "torch.fx.experimental.symbolic_shapes"
    ),
    "takes as long to import as torch": "torch.distributed.tensor",
    "torch's operator database takes seconds to load, and needs packages for tests": (
        "torch.testing._internal torch.testing._internal.opinfo torch.testing._internal.common_modules "
        "torch.testing._internal.common_methods_invocations"
    ),
    "a class of torch's own tests, which a release may lack": "torch.testing._internal.two_tensor",
}
LATE = {name for names in REASONS.values() for name in names.split()}


def modules() -> dict[str, Path]:
    found = {}
    for package in FLOORS:
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


@functools.cache
def imports() -> frozenset[tuple[str, str, bool]]:
    """(importer, imported module, whether inside of a function) for every import in the packages."""
    known, found = modules(), set()
    for name, path in known.items():
        for statement, inside in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import):
                targets = [alias.name for alias in statement.names]
            else:
                source = statement.module or ""
                targets = [f"{source}.{a.name}" if f"{source}.{a.name}" in known else source for a in statement.names]
            for target in targets:
                if target != name:
                    found.add((name, target, inside))
    return frozenset(found)


def edges() -> list[tuple[str, str]]:
    """(importer, imported) among our own modules.

    A package's __init__ gathers what its modules offer: it is left out as an importer of theirs, not as imported.
    """
    known = modules()
    return [(a, b) for a, b, _ in imports() if b in known and not b.startswith(f"{a}.")]


def floor(module: str) -> int:
    package, _, inside = module.partition(".")
    room = inside.partition(".")[0]
    return next(n for n, rooms in enumerate(FLOORS[package]) if room in rooms)


def test_no_module_is_part_of_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported in edges():
        graph.setdefault(importer, set()).add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_has_a_floor(package: str) -> None:
    rooms = {name.split(".")[1] for name in modules() if name.startswith(f"{package}.")}
    assert rooms == {room for rooms in FLOORS[package] for room in rooms}


@pytest.mark.parametrize("package", FLOORS)
def test_the_page_draws_the_rooms_from_the_top_down(package: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawn = page.partition(f"\n{package}/  ")[2].partition("\n\n" if package == "op_registry" else "```")[0]
    rooms = [room for line in drawn.splitlines()[1:] for room in line[:33].replace("/", "").split()]
    floors = [floor(f"{package}.{room}") for room in rooms]
    assert floors == sorted(floors, reverse=True)
    assert sorted(rooms) == sorted(room for rooms in FLOORS[package] for room in rooms)


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_down(package: str) -> None:
    inside = [(a, b) for a, b in edges() if a.startswith(f"{package}.") and b.startswith(f"{package}.")]
    room = {name: name.split(".")[1] for pair in inside for name in pair}
    upward = [(a, b) for a, b in inside if room[a] != room[b] and floor(a) <= floor(b)]
    assert upward == []


def test_what_operators_mean_knows_no_tensor_subclass() -> None:
    assert [(a, b) for a, b in edges() if a.startswith("op_registry") and b.startswith("masked_dispatch")] == []


def test_rules_import_public_words_what_lies_below_these_and_their_own_family() -> None:
    def family(module: str) -> str:
        return ".".join(module.split(".")[:3])

    foreign = [
        (a, b)
        for a, b in edges()
        if a.startswith("op_registry.ops.") and family(a) != family(b) and floor(b) > floor("op_registry.authoring")
    ]
    assert foreign == []
    assert len(authoring.__all__) <= 120


def test_a_word_for_authors_that_rules_share_is_imported_from_one_place() -> None:
    doors = {name: value for name in authoring.__all__ if (value := getattr(authoring, name)) is not None}
    elsewhere = [
        (module, alias.name)
        for module, path in modules().items()
        if module.startswith("op_registry.ops.")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module != "op_registry.authoring"
        for alias in node.names
        if alias.name in doors and not (node.module or "").startswith(".".join(module.split(".")[:3]))
    ]
    assert elsewhere == []


def test_every_word_for_rule_authors_is_documented() -> None:
    undocumented = [
        name
        for name in authoring.__all__
        if not name.isupper()
        and name not in ("Number", "Dims", "Coordinates", "AnyRecord", "Run")
        and not getattr(authoring, name).__doc__
    ]
    assert undocumented == []


def test_imports_inside_of_functions_have_a_reason() -> None:
    late = {(importer, imported) for importer, imported, inside in imports() if inside}
    assert {pair for pair in late if pair[1] not in LATE} == set()
    assert {imported for _, imported in late} == LATE, "some of these are no longer there"
