"""A verdict: for each operator and law, whether the law holds; and whether that is good enough for the caller.

    holds           some trial tested the law, and none broke it; a refusal that the semantics require counts as a test,
                    unless another call was refused that has a result
    broken          a trial broke the law, or raised an error that plain torch does not raise
    undecided       the law applies, but no trial could test it, or every call that has a result was refused; the reason
                    says which
    gap             every trial that tested the law fell into a named gap (rule.gap)
    does not apply  by the operator's schema, category or derivative (applicability.py)

A verdict is true if every answer is "holds", "gap" or "does not apply", or if the caller allows it, law by law. An
unneeded allowance makes the verdict false too, so that no allowance outlives its reason.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from op_registry.conformance.report import Outcome, Report

Decision = Literal["holds", "broken", "undecided", "gap", "does not apply"]

NAMES = {
    "P1": "all valid: as plain torch",
    "P2": "valid elements: as the oracle",
    "P3": "the data under the mask has no effect",
    "P4": "the same in every storage",
    "P5": "gradients",
    "P6": "views alias",
    "P7": "the same compiled",
    "P8": "masked results, or a refusal that names the operator",
    "P9": "a padded batch is its samples",
    "later": "what is masked later gets nothing back",
    "dims": "dimensions are as the rule states them",
}
# How many failures of one law a verdict prints.
SHOWN = 3


@dataclass(frozen=True)
class Answer:
    """The result of testing one law on one operator."""

    operator: str
    law: str
    decision: Decision
    # How many trials tested the law.
    trials: int
    # Why the law is undecided or does not apply; how many trials were refused, densified or gaps, although it holds.
    reason: str = ""
    # The trials that did not pass: broken, refused, gaps.
    outcomes: tuple[Outcome, ...] = ()

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The trials that broke the law."""
        return tuple(o for o in self.outcomes if o.status in ("broken", "error"))

    def __str__(self) -> str:
        return self.text()

    def text(self, printed: dict[str, str] | None = None) -> str:
        """The answer in words, with a trial of each kind of failure.

        printed  the kinds of messages, and the remarks, that other answers of the operator have, by the law; new ones
                 are added
        """
        trials = f"{self.trials:4d} trials" if self.decision != "does not apply" else " " * 11
        lines = [
            f"{self.law} {self.decision:14s} {trials}  {NAMES[self.law]}{f': {self.reason}' if self.reason else ''}"
        ]
        printed = {} if printed is None else printed
        for outcome, law in self._shown(printed):
            if law != self.law:
                lines.append(f"   {outcome.status} in {outcome.description}: as under {law}")
                continue
            lines.append(f"   {outcome.status} in {outcome.description}: {outcome.message}")
            command, _, remark = outcome.repro.partition("  # ")
            # What is said of every command line is said once.
            lines.append(f"   {command if remark in printed else outcome.repro}")
            printed[remark] = self.law
        return "\n".join(lines)

    def _shown(self, printed: dict[str, str]) -> list[tuple[Outcome, str]]:
        """One trial for each kind of message, with the first law that has it; adds new kinds to `printed`."""
        by_kind: dict[str, Outcome] = {}
        for outcome in self.failures or self.outcomes:
            by_kind.setdefault(kind_of_message(outcome.message), outcome)
        shown = []
        for kind, outcome in list(by_kind.items())[:SHOWN]:
            is_error = kind != outcome.message
            law = printed.setdefault(kind, self.law) if is_error else self.law
            shown.append((outcome, law))
        earlier = [pair for pair in shown if pair[1] != self.law]
        return [pair for pair in shown if pair[1] == self.law] + earlier[:1]


def kind_of_message(message: str) -> str:
    """A message; an error's text without numbers and shapes, in which errors with one cause differ."""
    if "Error: " not in message:
        return message
    error = message.rpartition("Error: ")[2]
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "", re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", error))[:100]


def answer_of(report: Report, law: str) -> Answer:
    """A law's answer, from the counts of a report."""
    counts = report.counts.get(law, {})
    outcomes = tuple(o for o in report.outcomes if o.law == law)

    def answer(decision: Decision, reason: str = "") -> Answer:
        return Answer(report.operator, law, decision, report.asked(law), reason, outcomes)

    # P9 holds where a call is refused, so that its refusals are "refused rightly".
    shown = ("refused", "gap", "refused rightly") if law == "P9" else ("refused", "gap")
    exceptions = ", ".join(
        [f"{counts[s]} {s}" for s in shown if counts.get(s)] + _stored_densely(counts, report.reasons)
    )
    if counts.get("broken") or counts.get("error"):
        return answer("broken")
    # Right refusals alone don't show that a law holds if calls that have a result were refused too.
    if counts.get("pass") or counts.get("densified") or (counts.get("refused rightly") and not counts.get("refused")):
        return answer("holds", exceptions)
    if counts.get("gap"):
        return answer("gap", exceptions)
    if law in report.exemptions:
        return answer("does not apply", report.exemptions[law])
    if counts.get("refused"):
        return answer("undecided", "every call that has a result was refused")
    return answer("undecided", _why_untested(report.silences.get(law, {})))


def _stored_densely(counts: Mapping[str, int], reasons: Mapping[str, int]) -> list[str]:
    """How many trials agree because their operands were stored densely, and the most common reason for it."""
    why = Counter({reason: n for reason, n in reasons.items() if not reason.startswith("no oracle")}).most_common(1)
    return [f"{counts['densified']} stored densely ({why[0][0]})"] if counts.get("densified") and why else []


def _why_untested(reasons: Mapping[str, int]) -> str:
    """Why no trial could test a law: the most common reasons."""
    if not reasons:
        return "there was nothing to try: no sample, or no mask that fits one"
    common = [f"{reason} ({n})" for reason, n in Counter(reasons).most_common(2)]
    return "no trial could test it: " + "; ".join(common)


@dataclass(frozen=True)
class Verdict:
    """The answers for all tested operators and laws; true if there are no objections."""

    reports: tuple[Report, ...]
    # Laws that may be undecided, and laws that may be broken, each with the caller's reason.
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
        """What makes the verdict false, one line each."""
        objections = [f"{a.operator} {a.law} is {a.decision}" for a in self.answers if self._objectionable(a)]
        if not self.reports:
            objections.append("nothing was checked")
        for decision, allowances in (("undecided", self.allow), ("broken", self.allow_broken)):
            for law, why in allowances.items():
                if not any(a.law == law and a.decision == decision for a in self.answers):
                    objections.append(f"{law} is allowed to be {decision} ({why}), but is not: remove the allowance")
        return tuple(objections)

    def _objectionable(self, answer: Answer) -> bool:
        if answer.decision == "undecided":
            return answer.law not in self.allow
        return answer.decision == "broken" and answer.law not in self.allow_broken

    def of(self, law: str) -> Decision:
        """The law's decision for all operators together: the worst one; "does not apply" if it applies to none."""
        decisions = {a.decision for a in self.answers if a.law == law}
        worst_first: tuple[Decision, ...] = ("broken", "undecided", "gap", "holds", "does not apply")
        for decision in worst_first:
            if decision in decisions:
                return decision
        raise KeyError(f"{law} is not among the laws that were tested")

    def __str__(self) -> str:
        lines: list[str] = []
        operator, printed = None, dict[str, str]()
        for answer in self.answers:
            if answer.operator != operator:
                operator, printed = answer.operator, {}
                lines.append(operator)
            lines += [f"  {line}" for line in answer.text(printed).splitlines()]
            allowed = {"undecided": self.allow, "broken": self.allow_broken}.get(answer.decision, {})
            if answer.law in allowed:
                lines.append(f"     allowed: {allowed[answer.law]}")
        lines.append("verdict: " + ("; ".join(self.objections) if self.objections else "every law that applies holds"))
        return "\n".join(lines)

    __repr__ = __str__
