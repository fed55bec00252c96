"""Which operators one of torch's Python functions calls, according to its source.

Called names are looked up in the function's scope: torch's C++ functions, and torch's Python functions, whose source is
read in turn. A method call on a local variable (``input.softmax(dim)``) counts as a tensor method if tensors have one
of that name. Since the source is read and not run, operators called by ``+`` and ``[]`` or by functions passed as
arguments are missed, and those in branches that are never taken are included.
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

# How deep calls of Python functions are followed.
DEEPEST = 4
# Modules whose functions do no tensor work.
NO_TENSOR_WORK = (
    "torch.overrides", "torch._jit_internal", "torch.jit", "torch.compiler", "torch._dynamo", "torch.utils",
    "torch.autograd", "torch._C", "torch.types", "torch.hub", "torch.multiprocessing",
)  # fmt: skip
# Operators that return a tensor's geometry, whatever its mask.
GEOMETRY = ("size", "dim", "numel", "stride", "is_same_size", "is_floating_point", "is_complex", "sym_size")


def operators_called(function: Callable[..., Any]) -> list[Operator]:
    """The operators that a Python function calls, in the order of its source; none if there is no source."""
    operators: dict[Operator, None] = {}
    _read(function, operators, set(), 0)
    return [op for op in operators if _computes(op)]


def _computes(op: Operator) -> bool:
    """Whether an operator computes with tensors: not `aten::warn`, geometry, or operators only TorchScript has."""
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    name = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    works = any(takes_tensor(o) and in_dispatcher(o) for o in overloads)
    return works and name.rpartition("::")[2] not in GEOMETRY


def _read(function: Callable[..., Any], operators: dict[Operator, None], seen: set[int], depth: int) -> None:
    """Add the operators that a function calls to `operators`."""
    function = inspect.unwrap(function)
    if id(function) in seen or depth > DEEPEST or not isinstance(function, (types.FunctionType, types.MethodType)):
        return
    seen.add(id(function))
    nonlocals, names = _names_of(function)
    for callee in nonlocals.values():  # a function built from others, such as F.max_pool2d from its two cases
        if isinstance(callee, types.FunctionType):
            _read(callee, operators, seen, depth)
    for call in _calls(function):
        callee = _evaluated(call.func, names)
        if isinstance(callee, (OpOverload, OpOverloadPacket)):
            operators.setdefault(callee)
        elif isinstance(callee, WRITTEN_IN_C):
            operator = operator_of(callee)
            if operator is not None:
                operators.setdefault(operator)
        elif callee is not None and _of_torch(callee):
            _read(callee, operators, seen, depth + 1)


def _names_of(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables that a function closes over, and all names in its scope but locals."""
    nonlocals = dict(inspect.getclosurevars(function).nonlocals)
    return nonlocals, {**function.__globals__, **nonlocals}


def _calls(function: Callable[..., Any]) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    yield from sorted(calls, key=lambda node: (node.lineno, node.col_offset))


def _evaluated(called: ast.expr, names: dict[str, Any]) -> Any:
    """The called object: looked up in `names` if the expression starts with one of them, else a tensor method."""
    if isinstance(called, ast.Name):
        return names.get(called.id)
    if not isinstance(called, ast.Attribute):
        return None
    path, base = [called.attr], called.value
    while isinstance(base, ast.Attribute):
        path.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name) and base.id in names:
        attribute = names[base.id]
        for part in reversed(path):
            attribute = getattr(attribute, part, None)
        return attribute
    is_own = isinstance(base, ast.Name) and base.id == "self"  # a module's own method or submodule
    return None if is_own else getattr(torch.Tensor, called.attr, None)


def _of_torch(callee: object) -> bool:
    module = getattr(callee, "__module__", None) or ""
    return module.partition(".")[0] == "torch" and not module.startswith(NO_TENSOR_WORK)
