"""How an operator runs on sparse records.

A rule has at most one lowering for each kind of sparse record: its own (``rule.lowering``), else its category's. A
lowering is called as ``(op, *args, **kwargs)`` with records in place of tensors, whatever its rule's dense run takes.
Several ways to run one operator are written in the order in which they are tried, ``first_of(a, b, c)``.

A lowering that does not take a call raises NotLowered with its reason. Whoever asked may store the operands densely and
call again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch._ops import OpOverload

from op_registry.rule import Rule
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse


@dataclass(frozen=True)
class ForRule:
    """A lowering that many rules share: called with the rule in front of the overload."""

    run: Callable[..., Any]


@dataclass(frozen=True)
class FirstOf:
    """Alternatives, of which the first one that takes a call runs it."""

    alternatives: tuple[Any, ...]


Lowering = Callable[..., Any] | ForRule | FirstOf


def first_of(*alternatives: Lowering) -> FirstOf:
    """One lowering out of several, tried in this order."""
    return FirstOf(alternatives)


def never(reason: str) -> Callable[..., NoReturn]:
    """A lowering that takes no call, for a rule that its category's would run wrongly."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotLowered(reason)

    return refuse


def lowering_of(rule: Rule, record: type) -> Lowering | None:
    """How a rule runs on a kind of sparse record: its own lowering, or the one of its category; None without either."""
    own: Lowering | None = rule.lowerings.get(record)
    return own if own is not None else rule.category.lowerings.get(record)


def alternatives(rule: Rule, record: type) -> tuple[Callable[..., Any], ...]:
    """The functions that may run a rule on a kind of sparse record, in the order in which they are tried."""

    def functions(lowering: Lowering | None) -> tuple[Callable[..., Any], ...]:
        if isinstance(lowering, FirstOf):
            return tuple(f for each in lowering.alternatives for f in functions(each))
        if lowering is None:
            return ()
        return (lowering.run if isinstance(lowering, ForRule) else lowering,)

    return functions(lowering_of(rule, record))


def run_sparsely(op: OpOverload, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a rule where an argument is a sparse record; NotLowered, with the reasons, where it has no way."""
    turned = _any_turned([*args, *kwargs.values()])
    lowering = lowering_of(rule, Permuted if turned else Sparse)
    if lowering is None:
        raise NotLowered("dense dimensions stand before sparse ones" if turned else rule.category.why_dense)
    return _run(lowering, rule, op, args, kwargs)


def _run(lowering: Lowering, rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(lowering, ForRule):
        return lowering.run(rule, op, *args, **kwargs)
    if not isinstance(lowering, FirstOf):
        return lowering(op, *args, **kwargs)
    reasons = []
    for alternative in lowering.alternatives:
        try:
            return _run(alternative, rule, op, args, kwargs)
        except NotLowered as reason:  # noqa: PERF203
            reasons.append(str(reason))
    raise NotLowered("; ".join(dict.fromkeys(reasons)))


def _any_turned(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Permuted) or (isinstance(v, (list, tuple)) and _any_turned(v)) for v in values)
