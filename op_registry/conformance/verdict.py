"""A verdict: each law's answer about each operator, and whether the caller can build on it.

    holds           some trial had something to ask, and none that had was broken; right refusals count where no other
                    call was refused
    broken          a trial was broken, or raised what plain torch does not
    undecided       the law applies, and no trial had anything to ask or to say, or every call that has an answer was
                    refused; the reason says why
    gap             every trial that had something to ask fell into a gap that the rule names (rule.gap)
    does not apply  by the operator's schema, category or derivative (applicability.py)

A verdict is true where every answer is "holds", "gap" or "does not apply", or is allowed by the caller, law by law.
An allowance that nothing needs makes it false as well: what was mended is no longer excused.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from op_registry.conformance.report import Outcome, Report

Decision = Literal["holds", "broken", "undecided", "gap", "does not apply"]

NAMES = {
    "P1": "all valid: as plain torch",
    "P2": "on valid elements, what the oracle says",
    "P3": "nothing under the mask is seen",
    "P4": "the same in every storage",
    "P5": "gradients",
    "P6": "views alias",
    "P7": "the same compiled",
    "P8": "masked results, or a refusal that names the operator",
}
# Failures of one law that a verdict prints.
SHOWN = 3


@dataclass(frozen=True)
class Answer:
    """What came of one law for one operator."""

    operator: str
    law: str
    decision: Decision
    # Trials that had something to ask.
    trials: int
    # Why it is undecided or does not apply; what was refused or is a gap, beside what holds.
    reason: str = ""
    # The trials that did not pass: broken ones, refused ones, gaps.
    outcomes: tuple[Outcome, ...] = ()

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The trials in which the law was broken."""
        return tuple(o for o in self.outcomes if o.status in ("broken", "error"))

    def __str__(self) -> str:
        trials = f"{self.trials:4d} trials" if self.decision != "does not apply" else " " * 11
        lines = [
            f"{self.law} {self.decision:14s} {trials}  {NAMES[self.law]}{f': {self.reason}' if self.reason else ''}"
        ]
        shown: dict[str, Outcome] = {}
        for outcome in self.failures or self.outcomes:
            shown.setdefault(outcome.message, outcome)
        for outcome in list(shown.values())[:SHOWN]:
            lines.append(f"   {outcome.status} in {outcome.description}: {outcome.message}")
            lines.append(f"   {outcome.repro}")
        return "\n".join(lines)


def answer_of(report: Report, law: str) -> Answer:
    """A law's answer, from the counts of a report."""
    counts = report.counts.get(law, {})
    outcomes = tuple(o for o in report.outcomes if o.law == law)

    def answer(decision: Decision, reason: str = "") -> Answer:
        return Answer(report.operator, law, decision, report.asked(law), reason, outcomes)

    beside = [f"{counts[s]} {s}" for s in ("refused", "gap") if counts.get(s)]
    if counts.get("broken") or counts.get("error"):
        return answer("broken")
    # Refusals of what has no answer are right, and say nothing where calls that have one were refused too.
    if counts.get("pass") or counts.get("densified") or (counts.get("refused rightly") and not counts.get("refused")):
        return answer("holds", ", ".join(beside))
    if counts.get("gap"):
        return answer("gap", ", ".join(beside))
    if law in report.exemptions:
        return answer("does not apply", report.exemptions[law])
    if counts.get("refused"):
        return answer("undecided", "every call that has an answer was refused")
    return answer("undecided", _silence(report.silences.get(law, {})))


def _silence(silences: Mapping[str, int]) -> str:
    """Why no trial had anything to ask: the commonest reasons."""
    if not silences:
        return "there was nothing to try: no sample, or no mask that fits one"
    common = [f"{reason} ({n})" for reason, n in Counter(silences).most_common(2)]
    return "no trial had anything to ask: " + "; ".join(common)


@dataclass(frozen=True)
class Verdict:
    """The answers of all laws that were asked, for all operators that were; true where nothing stands against them."""

    reports: tuple[Report, ...]
    # Why the caller takes a law that is undecided, and one that is broken, for good.
    allow: Mapping[str, str] = field(default_factory=dict)
    allow_broken: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.objections

    @functools.cached_property
    def answers(self) -> tuple[Answer, ...]:
        """One answer for each operator and law, in order."""
        return tuple(answer_of(report, law) for report in self.reports for law in sorted(report.counts))

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Every broken trial, with the line that repeats it."""
        return tuple(outcome for answer in self.answers for outcome in answer.failures)

    @functools.cached_property
    def objections(self) -> tuple[str, ...]:
        """What makes the verdict false, a line each."""
        found = [f"{a.operator} {a.law} is {a.decision}" for a in self.answers if self._objectionable(a)]
        if not self.reports:
            found.append("nothing was checked")
        for decision, allowances in (("undecided", self.allow), ("broken", self.allow_broken)):
            for law, why in allowances.items():
                if not any(a.law == law and a.decision == decision for a in self.answers):
                    found.append(f"{law} may be {decision} ({why}), and is not: take the allowance out")
        return tuple(found)

    def _objectionable(self, answer: Answer) -> bool:
        if answer.decision == "undecided":
            return answer.law not in self.allow
        return answer.decision == "broken" and answer.law not in self.allow_broken

    def of(self, law: str) -> Decision:
        """The law's answer for all operators together: the worst one; "does not apply" where it applies to none."""
        found = {a.decision for a in self.answers if a.law == law}
        order: tuple[Decision, ...] = ("broken", "undecided", "gap", "holds", "does not apply")
        for decision in order:
            if decision in found:
                return decision
        raise KeyError(f"{law} was not among the laws that were asked")

    def __str__(self) -> str:
        lines: list[str] = []
        operator = None
        for answer in self.answers:
            if answer.operator != operator:
                operator = answer.operator
                lines.append(operator)
            lines += [f"  {line}" for line in str(answer).splitlines()]
            allowed = {"undecided": self.allow, "broken": self.allow_broken}.get(answer.decision, {})
            if answer.law in allowed:
                lines.append(f"     allowed: {allowed[answer.law]}")
        lines.append("verdict: " + ("; ".join(self.objections) if self.objections else "every law that applies holds"))
        return "\n".join(lines)

    __repr__ = __str__
