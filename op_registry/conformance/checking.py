"""`check`: one operator's laws, here and now, with a verdict for each and a line that repeats what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.samples import operators_of
from op_registry.conformance.trials import ALL_LAWS, Report, Settings, run_operator

NAMES = {
    "P1": "all valid: as plain torch",
    "P2": "what the oracle says of the valid elements",
    "P3": "nothing under the mask is seen",
    "P4": "the same in every storage",
    "P5": "gradients",
    "P6": "views alias",
    "P7": "the same in every mode",
}


@dataclass(frozen=True)
class Verdict:
    """What came of an operator's laws; true where none is broken. Prints one line for each law."""

    reports: tuple[Report, ...]

    def __bool__(self) -> bool:
        return not any(report.failures for report in self.reports)

    def of(self, law: str) -> str:
        """ "holds", "broken", "refused", "gap", or "not asked" where no trial had anything to ask."""
        counts: dict[str, int] = {}
        for report in self.reports:
            for status, n in report.counts.get(law, {}).items():
                counts[status] = counts.get(status, 0) + n
        if counts.get("broken") or counts.get("error"):
            return "broken"
        for status, name in (("refused", "refused"), ("gap", "gap"), ("pass", "holds"), ("densified", "holds")):
            if counts.get(status):
                return name
        return "not asked"

    def __str__(self) -> str:
        lines = []
        for report in self.reports:
            lines.append(report.operator)
            alone = Verdict((report,))
            for law in ALL_LAWS:
                if law not in report.counts:
                    continue
                tried = sum(n for status, n in report.counts[law].items() if status != "not asked")
                lines.append(f"  {law} {alone.of(law):9s} {tried:4d} trials  {NAMES[law]}")
                shown: set[str] = set()
                for outcome in report.outcomes:
                    if outcome.law == law and outcome.message not in shown and len(shown) < 3:
                        shown.add(outcome.message)
                        lines.append(f"       {outcome.status}, {outcome.description}: {outcome.message}")
                        lines.append(f"       {outcome.repro}")
            lines += [f"  P2 has {reason} ({n} trials)" for reason, n in report.reasons.items()]
        return "\n".join(lines)

    __repr__ = __str__


def check(
    op: OpOverload | OpOverloadPacket | str,
    *,
    subject: str | None = None,
    laws: Sequence[str] = ALL_LAWS,
    most: int | None = 4,
    seed: int = 0,
) -> Verdict:
    """Run the laws on an operator: one of torch's, by overload, packet or name, or one of your own that has a rule.

    Samples of your own operator come from ``rule.samples``; an elementwise one needs none. `most` bounds the samples of
    each entry, None runs them all. `subject` names what is tested (see :func:`find_subject`).
    """
    settings = Settings(subject=subject, laws=tuple(laws), most=most, seed=seed)
    return Verdict(tuple(run_operator(operator, settings) for operator in operators_of(op)))
