"""Rules inside a function: the meaning of an operator when one particular Python function calls it.

A function that torch writes in Python runs line by line, and each of its lines calls operators by their rules. Two
kinds of line then give a wrong result: division by a *size*, if some of the elements are invalid, and a test of *every*
element, if none is valid. For these, one operator gets another rule, which only holds when that function (or a module
of such functions) calls it::

    @inside(torch.nn.functional.lp_pool2d, aten.avg_pool2d.default, category=POOLING)
    def lp_pool2d(self: Dense, kernel_size, stride=(), padding=(0,), ceil_mode=False) -> Dense: ...

The rule has the operator's signature. It is a rule like any other: on records, with a lowering where it has one, or
composite, in which case its own calls have their ordinary meaning.

We recognise the calling function by its code, so aliases of the function work too, and operators that have no such rule
pay nothing. Compiled code calls such a function whole, without tracing it. If the function itself is compiled, it runs
uncompiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch._ops import OpOverload

from op_registry.laws.categories import categories
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

    Returns the rule. Raises TypeError if `function` has no Python code, and ValueError for a second rule of an operator
    inside a function.
    """
    registration = Registration.of_caller("inside")
    caller = caller_key(function)
    category = registration.category(category, categories())
    (op,) = registration.overloads([op], category)

    def add(run: Run) -> InsideRule:
        registration.function_inside(run, op)
        rule = InsideRule(function, op, category, run, when or {}, written_at(2), registry.written)
        registry.add_inside(caller, rule)
        return rule

    return add


def caller_key(function: Callable[..., Any] | ModuleType) -> CodeType | str:
    """The key by which we recognise a caller: a function's code, or the name of a module or package."""
    if isinstance(function, ModuleType):
        return function.__name__
    unwrapped = inspect.unwrap(function)
    if not isinstance(unwrapped, FunctionType):
        raise TypeError(
            f"inside({function!r}, ...): only a function written in Python calls operators that can be given another "
            "rule; an operator written in C++ has one rule, registered with masked_rule(...)."
        )
    return unwrapped.__code__


def rules_inside_functions() -> list[InsideRule]:
    """Every rule that holds inside one function only."""
    return [rule for op in registry.ops_inside() for rule in registry.inside(op).values()]
