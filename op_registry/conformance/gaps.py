"""Named exceptions: exactly what fails, under which law, and why. A gap that no longer fails is itself a failure.

Gaps of a rule hang on the rule (``rule.gap("P6", why=…)``); the table here is for entries of torch's database whose
trouble lies elsewhere (in torch, or between several rules). `where` narrows a gap to trials whose description has all
of its words: ``"float32 sample 3 half"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.conformance.samples import DatabaseOperator, Operator, RegisteredOperator, overloads_by_entry
from op_registry.registry import registry
from op_registry.resolve import resolve
from op_registry.rule import Gap

_WRITTEN_AFTERWARDS = (
    "an out= that overlaps an input is not refused: it is written after the result is computed, and right"
)
_CAST = (
    "an out= of a dtype that torch's kernel refuses, and its meta kernel does not, is cast to, as elementwise out= is"
)
_UNKNOWN_START = (
    "a start that is known only when the graph runs gives data and mask sizes of which nobody knows the same"
)
_NO_FREEDOM = (
    "n equals the correction: torch's formula gives ±inf, and the derivative through the moments inf - inf, NaN"
)

TABLE: dict[str, tuple[Gap, ...]] = {
    "cat": (Gap("P1", _WRITTEN_AFTERWARDS, "error 6"), Gap("P1", _WRITTEN_AFTERWARDS, "error 7")),
    "aminmax": (Gap("P1", _CAST, "error 3"),),
    "complex": (Gap("P1", _CAST, "error 2"),),
    "narrow": (Gap("P7", _UNKNOWN_START, "aten.narrow.Tensor"),),
    "var": (Gap("P5", _NO_FREEDOM, "float64 sample 6 half"),),
    "var_mean": (Gap("P5", _NO_FREEDOM, "float64 sample 6 half"),),
    "multinomial": (Gap("P1", _CAST, "error 2"),),
}


def gaps_of(operator: Operator) -> Sequence[Gap]:
    """Every gap that is named for an operator: in the table, and on the rules that it calls."""
    found = list(TABLE.get(operator.name, ()))
    if not any(registry.get(op).gaps for op in registry):  # type: ignore[union-attr]
        return found
    if isinstance(operator, RegisteredOperator):
        overloads: Sequence[object] = (operator.op,)
    elif isinstance(operator, DatabaseOperator):
        overloads = overloads_by_entry()[operator.name]
    else:
        overloads = ()
    rules = {id(rule): rule for op in overloads if (rule := resolve(op).rule) is not None}  # type: ignore[arg-type]
    return [*found, *(gap for rule in rules.values() for gap in rule.gaps)]


def covers(gap: Gap, law: str, description: str) -> bool:
    """Whether the gap speaks of a trial of `law` that is described so."""
    return gap.law == law and set(gap.where.split()) <= set(description.split())
