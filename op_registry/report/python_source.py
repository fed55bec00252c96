"""Which operators a Python function of torch's calls, as far as its source says.

Calls are looked up by the names that the function sees: torch's C++ functions, and Python functions of torch's, whose
source is read in turn. A call on something local (``input.softmax(dim)``) is taken for a tensor's method if tensors
have one of that name. Operators that come of ``+`` and ``[]``, or of functions that are handed over, are not found, and
a branch that is never taken is: it is a reading, not a run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.report.names import WRITTEN_IN_C, Operator, operator_of
from op_registry.rule import in_dispatcher, takes_tensor

# How deep functions that call functions are followed.
DEEPEST = 4
# What torch's Python functions call beside their work.
BESIDE = (
    "torch.overrides", "torch._jit_internal", "torch.jit", "torch.compiler", "torch._dynamo", "torch.utils",
    "torch.autograd", "torch._C", "torch.types", "torch.hub", "torch.multiprocessing",
)  # fmt: skip
# Operators that ask a tensor for its geometry: a mask has no part in the answer.
GEOMETRY = ("size", "dim", "numel", "stride", "is_same_size", "is_floating_point", "is_complex", "sym_size")


def operators_called(function: Callable[..., Any]) -> list[Operator]:
    """The operators that a Python function calls, in the order of its source; none where there is no source."""
    found: dict[Operator, None] = {}
    _read(function, found, set(), 0)
    return [op for op in found if _counts(op)]


def _counts(op: Operator) -> bool:
    """Whether an operator works on tensors when it is called: not warn, nor what TorchScript alone knows."""
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    name = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    works = any(takes_tensor(o) and in_dispatcher(o) for o in overloads)
    return works and name.rpartition("::")[2] not in GEOMETRY


def _read(function: Callable[..., Any], found: dict[Operator, None], seen: set[int], depth: int) -> None:
    function = inspect.unwrap(function)
    if id(function) in seen or depth > DEEPEST or not isinstance(function, (types.FunctionType, types.MethodType)):
        return
    seen.add(id(function))
    nonlocals, names = _names_of(function)
    for callee in nonlocals.values():  # what a function was made of, as F.max_pool2d of its two cases
        if isinstance(callee, types.FunctionType):
            _read(callee, found, seen, depth)
    for call in _calls(function):
        callee = _evaluated(call.func, names)
        if isinstance(callee, (OpOverload, OpOverloadPacket)):
            found.setdefault(callee)
        elif isinstance(callee, WRITTEN_IN_C):
            operator = operator_of(callee)
            if operator is not None:
                found.setdefault(operator)
        elif callee is not None and _of_torch(callee):
            _read(callee, found, seen, depth + 1)


def _names_of(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a function closes over, and every name that it sees from outside."""
    seen = inspect.getclosurevars(function)
    nonlocals = dict(seen.nonlocals)
    return nonlocals, {**function.__globals__, **nonlocals}


def _calls(function: Callable[..., Any]) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _evaluated(called: ast.expr, names: dict[str, Any]) -> Any:
    """What a call calls: looked up where it begins with a known name, else as a method of a tensor."""
    if isinstance(called, ast.Name):
        return names.get(called.id)
    if not isinstance(called, ast.Attribute):
        return None
    path, base = [called.attr], called.value
    while isinstance(base, ast.Attribute):
        path.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name) and base.id in names:
        found = names[base.id]
        for part in reversed(path):
            found = getattr(found, part, None)
        return found
    is_own = isinstance(base, ast.Name) and base.id == "self"  # a module's own method or submodule
    return None if is_own else getattr(torch.Tensor, called.attr, None)


def _of_torch(callee: object) -> bool:
    module = getattr(callee, "__module__", None) or ""
    return module.partition(".")[0] == "torch" and not module.startswith(BESIDE)
