"""How an operator runs on sparse records.

A rule has at most one lowering for each kind of sparse record: its own (``rule.lowering``), else its category's. A
lowering is called as ``(op, *args, **kwargs)`` with records in place of tensors, even if the rule's dense run does not
take the overload. Alternatives are listed in the order in which to try them, ``first_of(a, b, c)``.

A lowering raises NotLowered, with the reason, for a call that it does not handle. The caller may then store the
operands densely and call again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, overload

from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.errors import MaskedSemanticsError
from op_registry.records.dense import map_tensors
from op_registry.rule import Rule, name_rule
from op_registry.sparse.permuted import Permuted, sparse_dims_first
from op_registry.sparse.record import NotLowered, Sparse
from op_registry.sparse.takes import ANY_CALL, Takes


@dataclass(frozen=True)
class ForRule:
    """A lowering shared by many rules; it is called with the rule in front of the overload."""

    run: Callable[..., Any]


@dataclass(frozen=True)
class OnCall:
    """A lowering that gets the bound call in place of the overload and its arguments, and which calls it takes.

    of_dims  whether it is for rules that state their dimensions, and serves a category's others not at all
    """

    run: Callable[[Bound], Any]
    takes: Takes = ANY_CALL
    of_dims: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that `takes` names."""
        return self.takes.names

    def __call__(self, c: Bound) -> Any:
        """The result; NotLowered for a call that it does not take."""
        misfit = None if self.takes is ANY_CALL else self.takes.misfit(c)
        if misfit is not None:
            raise NotLowered(misfit)
        return self.run(c)


@dataclass(frozen=True)
class FirstOf:
    """Alternatives; the first one that handles a call runs it."""

    alternatives: tuple[Any, ...]


Lowering = Callable[..., Any] | ForRule | OnCall | FirstOf


@overload
def on_call(run: Callable[[Bound], Any]) -> OnCall: ...
@overload
def on_call(**takes: Any) -> Callable[[Callable[[Bound], Any]], OnCall]: ...
def on_call(run: Callable[[Bound], Any] | None = None, **takes: Any) -> Any:
    """Decorator: a lowering that is a function of the bound call, ``def layer_norm(c): ... c.weight ...``.

    Keyword arguments state the calls that it takes (:class:`Takes`): ``on_call(sparse="self", dense="weight")``.
    """
    return functools.partial(OnCall, takes=Takes(**takes)) if run is None else OnCall(run)


def first_of(*alternatives: Lowering) -> FirstOf:
    """One lowering made of several, tried in this order."""
    return FirstOf(tuple(way for alternative in alternatives for way in ways_of(alternative)))


def ways_of(lowering: Lowering | None) -> tuple[Any, ...]:
    """The lowerings that are tried, in order: those of a list of alternatives, or the lowering itself."""
    if lowering is None:
        return ()
    return lowering.alternatives if isinstance(lowering, FirstOf) else (lowering,)


def never(reason: str) -> Callable[..., NoReturn]:
    """A lowering that refuses every call, for rules that their category's lowering would run incorrectly."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotLowered(reason)

    return refuse


def lowering_of(rule: Rule, record: type) -> Lowering | None:
    """The lowering of a rule for a kind of sparse record: its own, else its category's, else None."""
    own: Lowering | None = rule.lowerings.get(record)
    shared: Lowering | None = rule.category.lowerings.get(record)
    return own or (None if rule.dims is None and _reads_dims(shared) else shared)


def _reads_dims(lowering: Lowering | None) -> bool:
    if isinstance(lowering, FirstOf):
        return all(_reads_dims(alternative) for alternative in lowering.alternatives)
    return isinstance(lowering, OnCall) and lowering.of_dims


def alternatives(rule: Rule, record: type) -> tuple[Callable[..., Any], ...]:
    """The functions that may run a rule on a kind of sparse record, in the order in which they are tried."""

    ways = ways_of(lowering_of(rule, record))
    return tuple(way.run if isinstance(way, (ForRule, OnCall)) else way for way in ways)


def run_sparsely(op: OpOverload, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rule on arguments with a sparse record among them; NotLowered, with all reasons, if no lowering can."""
    if not _any_permuted((*args, *kwargs.values()) if kwargs else args):
        lowering = lowering_of(rule, Sparse)
        if lowering is None:
            raise NotLowered(rule.category.why_dense)
        return run_lowering(lowering, rule, op, args, kwargs)
    reason = "dense dimensions stand before sparse ones"
    lowering = lowering_of(rule, Permuted)
    if lowering is not None:
        try:
            return run_lowering(lowering, rule, op, args, kwargs)
        except NotLowered as refusal:
            reason = str(refusal)
    lowering = lowering_of(rule, Sparse)
    if lowering is None:
        raise NotLowered(reason)
    try:
        args, named = map_tensors(sparse_dims_first, (list(args), list(kwargs.items())), Permuted)
    except NotLowered:
        raise NotLowered(reason) from None
    return run_lowering(lowering, rule, op, args, dict(named))


def run_lowering(lowering: Lowering, rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one lowering of a rule; NotLowered, with all reasons, if none of its alternatives can."""
    c: Bound | None = None  # the call, which alternatives share; it is bound for those that take it
    reasons = []
    ways = ways_of(lowering)
    for way in ways:
        try:
            if isinstance(way, ForRule):
                return way.run(rule, op, *args, **kwargs)
            if not isinstance(way, OnCall):
                return way(op, *args, **kwargs)
            c = c or Bound.of(rule, op, args, kwargs)
            return way(c)
        except NotLowered as reason:  # noqa: PERF203
            if len(ways) == 1:
                raise
            reasons.append(str(reason))
        except MaskedSemanticsError:
            raise
        except Exception as error:
            if not isinstance(way, ForRule):
                name_rule(error, rule, op)
            raise
    raise NotLowered("; ".join(dict.fromkeys(reasons)))


def _any_permuted(values: Sequence[Any]) -> bool:
    return any(type(v) is Permuted or (type(v) in (list, tuple) and Permuted in map(type, v)) for v in values)
