"""A verdict: for each operator and law, whether the law holds; and whether that is good enough for the caller.

    holds           some trial tested the law, and none broke it; a refusal that the semantics require counts as a test,
                    unless another call was refused that has a result
    broken          a trial broke the law, or raised an error that plain torch does not raise
    undecided       the law applies, but no trial could test it, or every call that has a result was refused; the reason
                    says which
    gap             every trial that tested the law fell into a named gap (rule.gap)
    does not apply  by the operator's schema, category or derivative (each law says which)

A verdict is true if every answer is "holds", "gap" or "does not apply", or if the caller allows it, law by law. An
unneeded allowance makes the verdict false too, so that no allowance outlives its reason.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from op_registry.conformance.law import Case, Law, Status
from op_registry.conformance.laws import LAWS


@dataclass(frozen=True)
class Outcome:
    """One trial that did not pass. `status` is a :data:`Status`."""

    law: str
    description: str
    status: str
    message: str
    repro: str


@dataclass
class Report:
    """The results for one operator: the number of trials by law and status, and those that did not pass."""

    operator: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    # For each law, why trials did not test it, with the number of trials.
    silences: dict[str, dict[str, int]] = field(default_factory=dict)
    # Laws that don't apply to the operator, and why not.
    exemptions: dict[str, str] = field(default_factory=dict)
    # The number of trials by dtype and status.
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    # The number of trials of P4 by storage and status.
    storages: dict[str, dict[str, int]] = field(default_factory=dict)
    # For laws that are asked of rules (P9): the number of trials by overload and status; why calls were refused; why
    # there was nothing to ask.
    rules: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: dict[str, dict[str, int]] = field(default_factory=dict)
    unasked: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tables(self) -> tuple[dict[str, dict[str, int]], ...]:
        """All that is counted by status or reason."""
        return (
            self.counts, self.dtypes, self.storages, self.silences, self.rules, self.refusals, self.unasked
        )  # fmt: skip

    @property
    def failures(self) -> list[Outcome]:
        """Broken laws and unexpected errors, except in named gaps."""
        return [o for o in self.outcomes if o.status in ("broken", "error")]

    def count(self, status: str) -> int:
        """The number of trials with this status, for all laws."""
        return sum(c.get(status, 0) for c in self.counts.values())

    def add(self, other: Report) -> None:
        """Add the results of other trials of the same operator."""
        for mine, others in zip(self.tables, other.tables, strict=True):
            for key, counts in others.items():
                mine[key] = dict(Counter(mine.get(key, {})) + Counter(counts))
        self.outcomes += other.outcomes
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.seconds += other.seconds
        exemptions = self.exemptions | other.exemptions
        self.exemptions = {law: why for law, why in exemptions.items() if not self.asked(law)}

    def record(self, law: Law, case: Case, status: Status, message: str, line: str) -> None:
        """Count the outcome of a case; `line` is the command that repeats it."""
        self.counts.setdefault(law.name, Counter())[status] += 1
        self.dtypes.setdefault(case.description.partition(" ")[0], Counter())[status] += 1
        if status == "densified" or (status == "not asked" and message.startswith("no oracle")):
            self.reasons[message] = self.reasons.get(message, 0) + 1
        elif status not in ("pass", "refused rightly", "not asked"):
            self.outcomes.append(Outcome(law.name, case.description, status, message, line))
        if status == "not asked":
            self.silences.setdefault(law.name, Counter())[message] += 1
        if law.check is None and case.option is not None and case.option[0] == "--storage" and case.trial is not None:
            self.storages.setdefault(case.option[1], Counter())[status] += 1
        if law.of_rules:
            self.rules.setdefault(case.asked_of, Counter())[status] += 1
            for of_status, reasons in (("refused rightly", self.refusals), ("not asked", self.unasked)):
                if status == of_status:
                    reasons.setdefault(case.asked_of, Counter())[message] += 1

    def asked(self, law: str) -> int:
        """The number of trials that tested the law."""
        return sum(n for status, n in self.counts.get(law, {}).items() if status != "not asked")

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Report:
        """From the results file."""
        outcomes = [Outcome(**o) for o in fields.pop("outcomes")]
        return cls(**fields, outcomes=outcomes)


# ----------------------------------------------------------------------------------------------------------- answers

Decision = Literal["holds", "broken", "undecided", "gap", "does not apply"]

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
        words = LAWS[self.law].words
        lines = [f"{self.law} {self.decision:14s} {trials}  {words}{f': {self.reason}' if self.reason else ''}"]
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

    # A law that is asked of rules holds where a call is refused, so that its refusals are "refused rightly".
    shown = ("refused", "gap", "refused rightly") if LAWS[law].of_rules else ("refused", "gap")
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
