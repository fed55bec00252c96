"""Rules inside a function: what an operator means where one Python function calls it.

A function that torch writes in Python, or a module of such functions, runs line by line, and each of its lines calls
operators by their rules. Two kinds of line do not mean what they compute: division by a *size*, where some of the
elements are invalid, and a question about *every* element, where none is valid. There, one operator in the body gets
another rule, which holds when that function calls it, and nowhere else::

    @inside(torch.nn.functional.lp_pool2d, aten.avg_pool2d.default, category=POOLING)
    def lp_pool2d(self: Dense, kernel_size, stride=(), padding=(0,), ceil_mode=False) -> Dense: ...

The rule has the operator's signature. It is a rule like any other: on records, with a lowering where it has one, or
composite, in which case its own calls have their ordinary meaning.

The function that calls is recognised by its code, so that aliases and modules that hold the function are served, and
operators that have no such rule pay nothing. Compiled code calls such a function whole. Compiled by itself, it runs as
it is, uncompiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._ops import OpOverload

from op_registry.categories import categories
from op_registry.registration import Registration
from op_registry.registry import registry
from op_registry.rule import Category, InsideRule, Run, written_at


def inside(
    function: Callable[..., Any] | ModuleType,
    op: OpOverload,
    *,
    category: Category,
    when: Mapping[str, object] | None = None,
) -> Callable[[Run], InsideRule]:
    """Decorator: what `op` means when `function`, or any function of the module or package `function`, calls it.

    category  the law that the rule follows; COMPOSITE for a rule that is written in other operators
    when      values that local variables of the function must have: ``when={"reduction": "batchmean"}``

    Returns the rule. Raises TypeError for what has no Python code, and ValueError for a second rule of an operator
    inside a function.
    """
    registration = Registration.of_caller("inside")
    caller = caller_key(function)
    category = registration.category(category, categories())
    (op,) = registration.overloads([op], category)

    def add(run: Run) -> InsideRule:
        registration.function_inside(run, op)
        rule = InsideRule(function, op, category, run, when or {}, written_at(2))
        registry.add_inside(caller, rule)
        return rule

    return add


def caller_key(function: Callable[..., Any] | ModuleType) -> CodeType | str:
    """What a caller is recognised by: a function's code, or the name of a module or package."""
    if isinstance(function, ModuleType):
        return function.__name__
    unwrapped = inspect.unwrap(function)
    if not isinstance(unwrapped, FunctionType):
        raise TypeError(
            f"inside({function!r}, …): only a function written in Python calls operators that can be given another "
            "rule; an operator written in C++ has one rule, registered with masked_rule(...)."
        )
    return unwrapped.__code__


def rules_inside_functions() -> list[InsideRule]:
    """Every rule that holds inside one function only."""
    return [rule for op in registry.ops_inside() for rule in registry.inside(op).values()]
