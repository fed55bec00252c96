"""Private torch is used in the modules of masked_dispatch called …_internals.py, in masked_dispatch/assumptions, which
checks what these assume, or listed here.

Found in the sources: names in torch with a component that begins with an underscore (``torch._C``, ``from torch._ops
import``, ``"torch._dynamo"`` as text), and private attributes of tensors, operators and schemas.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from repository import ROOT

# Conformance is excluded: it tests torch itself and reads its test database.
EXEMPT = (
    "masked_dispatch/torch_internals.py",
    "masked_dispatch/compiler_internals.py",
    "masked_dispatch/distributed_internals.py",
    "masked_dispatch/engine_internals.py",
    "masked_dispatch/torchax/internals.py",
    "masked_dispatch/assumptions/",
    "masked_dispatch/replacements.py",  # names what is replaced
    "op_registry/conformance/",
    "op_registry/older_torch.py",
)

# Exceptions: the name, the files that may use it (by prefix), and why there is no public alternative.
# (op_registry cannot import masked_dispatch, so its uses cannot move to torch_internals.py.)
ALLOWED: dict[str, tuple[tuple[str, ...], str]] = {
    "torch._ops.OpOverload": (("",), "the type of overloads has no public name"),
    "torch._ops.OpOverloadPacket": (("",), "the type of overload packets has no public name"),
    "torch._check": (("",), "documented public API for traced code, despite its name"),
    "torch._assert_async": (
        ("op_registry/ops/queries/", "op_registry/records/tracing.py"),
        "there is no public assertion for compiled graphs",
    ),
    "._schema": (
        ("op_registry/",),
        "operators have no public accessor of their schema; common questions are in schema.py",
    ),
    "._overloadname": (("op_registry/",), "the overload's name has no public accessor"),
    "._qualified_op_name": (("op_registry/",), "a packet's name has no public accessor"),
    "._can_decompose": (("op_registry/",), "there is no public test whether torch decomposes an overload"),
    "._version": (("",), "the version counter of a tensor has no public accessor; autograd's notes document it"),
    "._is_param": (("masked_dispatch/tensor/",), "torch's own mark of a parameter that is a tensor subclass"),
    "._nnz": (("masked_dispatch/densification.py",), "the number of specified elements has no public accessor"),
    "._indices": (("masked_dispatch/", "op_registry/sparse/layout.py"), "indices() refuses uncoalesced tensors"),
    "._values": (("masked_dispatch/", "op_registry/sparse/layout.py"), "values() refuses uncoalesced tensors"),
    "torch._lobpcg": (("masked_dispatch/interop/outside_dispatch.py",), "where torch.lobpcg asks who is to run it"),
    "torch._lowrank": (
        ("masked_dispatch/interop/outside_dispatch.py",),
        "where torch.svd_lowrank asks who is to run it",
    ),
    "torch.distributions.von_mises._rejection_sample": (
        ("op_registry/ops/queries/empty.py",),
        "the loop that draws until every sample is accepted",
    ),
    "torch.ops._c10d_functional": (
        ("masked_dispatch/distributed/",),
        "the operators of torch's functional collectives, which have no public name",
    ),
    "torch.ops._c10d_functional_autograd": (
        ("masked_dispatch/distributed/functional_operators.py",),
        "those of which torch records the derivative",
    ),
    "torch._jit_internal": (
        ("masked_dispatch/seeing/audit.py",),
        "a module name, compared with those of Python functions",
    ),
}


def files() -> Iterator[Path]:
    for package in ("masked_dispatch", "op_registry"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith(EXEMPT):
                yield path


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_attributes() -> set[str]:
    """Private attributes of torch's classes whose instances our code handles."""
    op = torch.ops.aten.add.Tensor
    owners = (torch.Tensor, torch.nn.Parameter, op, torch.ops.aten.add, op._schema, op._schema.arguments[0])
    return {name for owner in owners for name in dir(owner) if is_private(name)} | {"_is_param"}


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Attributes that the packages define themselves: methods, class attributes, assignments to self."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for statement in node.body:
                    if isinstance(statement, ast.FunctionDef):
                        names.add(statement.name)
                    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                        names.add(statement.target.id)
            elif isinstance(node, ast.Attribute) and is_named(node.value, "self") and is_assigned(node):
                names.add(node.attr)
    return names


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_assigned(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def bound_to_torch(tree: ast.Module) -> dict[str, str]:
    """Local names of things imported from torch: {"forward_ad": "torch.autograd.forward_ad"}."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """The full name of an attribute chain that starts at something imported from torch."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, bound)
        return None if base is None else f"{base}.{node.attr}"
    return None


def is_operator(node: ast.Attribute) -> bool:
    """aten._conj: an operator, which rules may name."""
    return isinstance(node.value, ast.Name) and node.value.id in ("aten", "prims")


def shortest_private(name: str) -> str:
    """The name under which a private name is listed: torch._C for torch._C._functorch.level."""
    parts = name.split(".")
    first = next(n for n, part in enumerate(parts) if is_private(part))
    return ".".join(parts[: first + (2 if name.startswith("torch._ops.") else 1)])


def own_private_part(name: str) -> list[str]:
    """The name itself if its last component makes it private: each chain is listed once, by the shortest such name."""
    return [name] if name != "torch._ops" and is_private(name) and name == shortest_private(name) else []


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def docstrings(tree: ast.Module) -> set[int]:
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def private_uses(tree: ast.Module, attributes: set[str]) -> Iterator[str]:
    bound, skipped = bound_to_torch(tree), docstrings(tree)
    for node in ast.walk(tree):
        for name in imported(node):
            if name.startswith("torch.") and is_private(name):
                yield shortest_private(name)
        if isinstance(node, ast.Attribute):
            name = dotted(node, bound)
            if name is not None:
                yield from own_private_part(name)
            elif name is None and node.attr in attributes and not is_operator(node):
                yield f".{node.attr}"
        elif isinstance(node, ast.Call) and is_named(node.func, "getattr"):
            text = node.args[1]
            if isinstance(text, ast.Constant) and text.value in attributes:
                yield f".{text.value}"
        elif isinstance(node, ast.Constant) and id(node) not in skipped and is_private_module(node.value):
            yield shortest_private(str(node.value))


def is_private_module(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", value))


@functools.cache
def uses() -> set[tuple[str, str]]:
    """(private name, file) for every use."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files()}
    attributes = private_attributes() - own_names(trees)
    return {
        (name, path.relative_to(ROOT).as_posix())
        for path, tree in trees.items()
        for name in private_uses(tree, attributes)
    }


def test_private_torch_is_used_where_it_is_listed() -> None:
    def allowed(name: str, file: str) -> bool:
        return name in ALLOWED and file.startswith(ALLOWED[name][0])

    unlisted = [f"{file}: {name}" for name, file in sorted(uses()) if not allowed(name, file)]
    assert unlisted == [], "move these to masked_dispatch/torch_internals.py, or list them with a reason"


def test_every_listed_name_is_still_used() -> None:
    assert set(ALLOWED) == {name for name, _ in uses()}


def test_private_names_are_recognised() -> None:
    source = """
import torch
import torch._inductor.config
from torch.autograd import forward_ad
from torch.utils import _pytree as trees
def f(x, op):
    if forward_ad._current_level and "torch._dynamo" in modules:
        return torch._C._functorch.level(x), x._version, getattr(x, "_base"), trees.tree_map(op._schema)
    return torch.ops.aten.add(x.data, x.shape), x._own, aten._conj(x)
"""
    tree = ast.parse(source)
    assert set(private_uses(tree, private_attributes())) == {
        "torch._inductor",
        "torch.utils._pytree",
        "torch.autograd.forward_ad._current_level",
        "torch._dynamo",
        "torch._C",
        "._version",
        "._base",
        "._schema",
    }
