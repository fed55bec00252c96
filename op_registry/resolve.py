"""What an overload means: the only function that dispatch, coverage and error messages ask.

The first match wins:

1. a rule registered for the overload
2. the rule of its functional form, written back (in-place, out=), or of its single-tensor form (_foreach_; their out=
   forms are written back from the form that returns a list); out= of a factory (zeros.out) needs no rule
3. torch's own decomposition (CompositeImplicit operators), whose operators are resolved in turn
4. nothing: the operator is refused
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch._ops import OpOverload

from op_registry.registry import registry
from op_registry.rule import Rule
from op_registry.schema import functional_form, single_form, writes_a_factory

Kind = Literal["rule", "written back", "each of a list", "decomposes", "missing"]


@dataclass(frozen=True)
class Meaning:
    """How an overload is served: `kind`, and the rule and the overload that it is derived from, if any."""

    kind: Kind
    op: OpOverload
    base: OpOverload | None = None
    rule: Rule | None = None

    def __str__(self) -> str:
        if self.rule is not None and self.base is self.op:
            return str(self.rule)
        if self.rule is not None:
            return f"{self.op} is {self.base}, written back; {self.rule}"
        return f"{self.op}: {self.kind}"


def resolve(op: OpOverload) -> Meaning:
    """The meaning of `op` in the current state of the registry."""
    rule = registry.get(op)
    if rule is not None:
        return Meaning("rule", op, op, rule)
    base = functional_form(op)
    if base is not None:
        rule = registry.get(base)
        if rule is not None:
            return Meaning("written back", op, base, rule)
    if writes_a_factory(op) and not decomposes(op):
        return Meaning("written back", op)
    if single_form(op) is not None:
        return Meaning("each of a list", op, base)
    if decomposes(op):
        return Meaning("decomposes", op)
    return Meaning("missing", op)


def decomposes(op: OpOverload) -> bool:
    """Whether torch itself defines the operator in terms of others (CompositeImplicit)."""
    return bool(op._can_decompose())


def by_rule(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run another operator by its rule, for rules that are composed of others."""
    rule = resolve(op).rule
    assert rule is not None, f"{op} has lost its rule"
    return rule.bind(op)(*args, **kwargs)
