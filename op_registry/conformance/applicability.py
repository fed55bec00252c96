"""Decide which laws apply to an operator, by its schema, its rule's category and its derivative in plain torch.

The rule's results have no influence: a law that applies but that no trial could test is undecided (verdict.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch._ops import OpOverload

from op_registry.conformance import plain_torch, stated_dims
from op_registry.conformance.masked_later import A_PLAIN_RESULT, NO_OPERAND
from op_registry.conformance.own_operators import OwnForm, RegisteredOperator
from op_registry.conformance.sample import Operator
from op_registry.conformance.samples import (
    NOT_ON_THIS_MACHINE,
    DatabaseOperator,
    DirectOperator,
    chosen,
    overloads_called,
)
from op_registry.laws.categories import REFUSED
from op_registry.schema import is_view

# How many samples we differentiate to find out whether an operator has a derivative.
TRIED = 12


def exemption(operator: Operator, law: str, seed: int = 0, silences: Mapping[str, int] | None = None) -> str | None:
    """Why a law does not apply to an operator; None if it does.

    silences  why trials of the law had nothing to ask, with their number; None before there are any
    """
    if not operator.dtypes:
        return NOT_ON_THIS_MACHINE
    if _category(operator) == REFUSED.name and law not in ("P2", "P8"):
        return "its rule refuses every masked input"
    if law == "P5":
        return _no_derivative(operator, seed)
    if law == "later":
        nothing = [why for why in silences or () if why in (NO_OPERAND, A_PLAIN_RESULT)]
        return _no_derivative(operator, seed) or next(iter(nothing), None)
    if law == "P6":
        return _no_view(operator)
    if law == "P9":
        if silences is None:
            return None
        return next(iter(silences), "its samples call no rule that other operators' samples do not call")
    if law == "dims":
        return _no_dimensions(operator, seed)
    if law == "P7" and not operator.leading:
        return "it is tested once, in the operator's preferred dtype"
    return None


def _category(operator: Operator) -> str | None:
    rule = operator.rule if isinstance(operator, RegisteredOperator) else None
    return rule.category.name if rule is not None else None


def _no_derivative(operator: Operator, seed: int) -> str | None:
    if isinstance(operator, OwnForm) and operator.form == "out":
        return "an out= form has no derivative"
    dtype = operator.gradient_dtype
    if dtype is None:
        return "it has no derivative in float64"
    samples = [s for s in chosen(operator.samples(dtype), TRIED) if s.tensors]
    derivatives = [plain_torch.derivative(s, seed) for s in samples if plain_torch.forward(s, seed).error is None]
    if not derivatives or any(derivative.order for derivative in derivatives):
        return None
    why = next((d.why for d in derivatives if not plain_torch.says_that_there_is_none(d.why)), derivatives[0].why)
    if isinstance(operator, (OwnForm, RegisteredOperator)) and not plain_torch.says_that_there_is_none(why):
        return None  # the author's own formula raises
    return f"it has no derivative: {why}"


def _no_dimensions(operator: Operator, seed: int) -> str | None:
    outcomes = [(status, message) for _, status, message in stated_dims.outcomes(operator, seed)]
    if any(status != "not asked" for status, _ in outcomes):
        return None
    return outcomes[0][1] if outcomes else "no rule that its samples call states dimensions"


def _no_view(operator: Operator) -> str | None:
    overloads = _overloads(operator)
    if any(is_view(op) for op in overloads):
        return None
    return "its schema returns no view" if len(overloads) == 1 else "none of its overloads' schemas returns a view"


def _overloads(operator: Operator) -> Sequence[OpOverload]:
    if isinstance(operator, OwnForm):
        return (operator.mutable,)
    if isinstance(operator, RegisteredOperator):
        return (operator.op,)
    if isinstance(operator, DirectOperator):
        return (operator.op,)
    return overloads_called(operator.name.partition("+")[0]) if isinstance(operator, DatabaseOperator) else ()
