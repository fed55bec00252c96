"""The words that register operators under a category's law.

A category's word registers operators in one line and returns their :class:`Rule`::

    exp = elementwise(aten.exp)
    amax = reduction(aten.amax, identity=lowest)

Operators that follow a law but need a run of their own are functions with the operator's signature::

    @masked_rule(aten.cummax.default, category=SCAN)
    def cummax(x, dim): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from op_registry.bound import of_call
from op_registry.laws.categories import (
    CONTRACTION,
    ELEMENTWISE,
    MOVEMENT,
    OPAQUE,
    QUERY,
    REDUCTION,
    REFUSED,
    SCAN,
    Operator,
    categories,
    data_of,
    results_like,
)
from op_registry.records.dense import all_valid
from op_registry.registration import Registration
from op_registry.registry import registry
from op_registry.rule import Category, Rule, Run, packet_name, written_at
from op_registry.traits import OF_A_FUNCTION, OF_ANY_RULE


def identity_needed(category: str, op: OpOverload) -> str:
    """Why `category` cannot be registered without an identity, and what to write."""
    name = packet_name(op).replace("::", ".")
    return (
        "it needs identity=..., the number that takes the place of invalid elements and "
        "changes no result: 0 for a sum, 1 for a product, op_registry.authoring.lowest (a function of the dtype) for a "
        "maximum. Where no number does that, as for a mean, write the rule as a function: "
        f"@masked_rule(torch.ops.{name}, category={category.upper()})"
    )


def of_category(category: Category) -> Callable[..., Rule]:
    assert category.run is not None
    run: Run = category.run
    word = category.name.replace(" ", "_")
    known = tuple(dict.fromkeys((*category.traits, *OF_ANY_RULE)))

    def register(*operators: Operator, **traits: Any) -> Rule:
        registration = Registration.of_caller(word)
        ops = registration.overloads(operators, category)
        if "identity" in category.needs and "identity" not in traits:
            raise registration.error(identity_needed(category.name, ops[0]))
        stated = registration.traits(traits, known, category.needs)
        registration.dimensions(ops, stated.dims or category.dims, stated.dims is not None)
        return registry.add(Rule(ops, category, run, takes_op=True, where=registration.where, traits=stated))

    register.__name__ = register.__qualname__ = word
    register.__doc__ = (
        f"Register operators under the law: {category.law}. Keyword arguments are the rule's traits. Raises TypeError "
        "where it is written for what cannot work, ValueError for an operator that takes no tensor or has a rule."
    )
    return register


elementwise = of_category(ELEMENTWISE)
movement = of_category(MOVEMENT)
reduction = of_category(REDUCTION)
scan = of_category(SCAN)
contraction = of_category(CONTRACTION)
opaque = of_category(OPAQUE)
# refused(op, reason="…", instead="…"): both are clauses of the error's text.
refused = of_category(REFUSED)


def masked_rule(
    *operators: Operator,
    category: Category,
    takes_op: bool = False,
    takes_call: bool = False,
    torch_if_valid: bool = False,
    register: Callable[[Rule], Rule] = registry.add,
    **traits: Any,
) -> Callable[[Run], Rule]:
    """Decorator: a function with the operator's own signature becomes its rule.

    With `takes_op`, the function gets the overload as its first argument, for functions that serve several. With
    `takes_call`, it gets the call alone, a :class:`Bound`, and reads arguments by name: for operators with many, most
    of which it passes on. With `torch_if_valid`, it only gets calls with a mask: where nothing is masked, the operator
    itself runs, and its results are valid. Keyword arguments are the rule's traits: the `reason` of a refusal;
    ``dims=…``, which dimensions the operator works on (``Slices("one")``, ``Equation("mk,kn->mn")``,
    ``LastDims("normalized_shape")``), from which its lowerings to sparse storage follow; ``identity=…``, of a reduction
    that without derivatives is torch's own on elements filled with it, and ``divided=True``, that this is the sum
    divided by their number; ``plain=(1,)``, the indices of results that are plain tensors; ``sparse_factors=True``, of
    a product that torch also has for plain torch.sparse tensors, which other rules get stored densely;
    ``data_sizes=True``, that it computes tensors in between whose sizes depend on data. `register` takes the rule; an
    overlay's ``add``, for example. Raises TypeError where it is written for what cannot work, ValueError for an
    operator that takes no tensor or has a rule.
    """

    registration = Registration.of_caller("masked_rule")
    category = registration.category(category, categories())
    ops = registration.overloads(operators, category)
    stated = registration.traits(traits, OF_A_FUNCTION)
    registration.dimensions(ops, stated.dims, is_stated=True)
    if torch_if_valid and (category is QUERY or stated.plain):
        raise registration.error("torch_if_valid=True is for operators whose results have masks")

    def decorate(function: Run) -> Rule:
        if takes_call:
            function = of_call(function)
        else:
            registration.function(function, ops, takes_op, stated.unchanged)
        gets_op = takes_op or takes_call
        if torch_if_valid:
            function, gets_op = where_masked(function, gets_op), True
        return register(Rule(ops, category, function, gets_op, where=written_at(2), traits=stated))

    return decorate


def where_masked(function: Run, takes_op: bool) -> Run:
    """A rule's run, called with the overload first: `function` if something is masked, else the operator itself."""

    @functools.wraps(function)
    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if all_valid(*args, *kwargs.values()):
            return run_plain(op, args, kwargs)
        return function(op, *args, **kwargs) if takes_op else function(*args, **kwargs)

    return run


def run_plain(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator itself, for calls without a mask."""
    return results_like(op(*data_of(args), **{k: data_of(v) for k, v in kwargs.items()}), None)
