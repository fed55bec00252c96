"""The results of an operator's trials: counts by law, the trials that did not pass, and why laws were not tested."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# The outcomes of a trial, best first. "refused" breaks no law, but tests none either; "refused rightly" is a refusal
# that the semantics require.
Status = Literal["pass", "densified", "refused rightly", "not asked", "refused", "gap", "broken", "error"]


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
    def failures(self) -> list[Outcome]:
        """Broken laws and unexpected errors, except in named gaps."""
        return [o for o in self.outcomes if o.status in ("broken", "error")]

    def count(self, status: str) -> int:
        """The number of trials with this status, for all laws."""
        return sum(c.get(status, 0) for c in self.counts.values())

    def add(self, other: Report) -> None:
        """Add the results of other trials of the same operator."""
        tables = (
            (self.counts, other.counts),
            (self.dtypes, other.dtypes),
            (self.storages, other.storages),
            (self.silences, other.silences),
            (self.rules, other.rules),
            (self.refusals, other.refusals),
            (self.unasked, other.unasked),
        )
        for mine, theirs in tables:
            for key, counts in theirs.items():
                mine[key] = dict(Counter(mine.get(key, {})) + Counter(counts))
        self.outcomes += other.outcomes
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.seconds += other.seconds
        exemptions = self.exemptions | other.exemptions
        self.exemptions = {law: why for law, why in exemptions.items() if not self.asked(law)}

    def add_of_rule(self, op: str, status: Status, message: str) -> None:
        """Count one trial of a law that is asked of rules; `message` says why it was refused, or not asked."""
        self.rules.setdefault(op, Counter())[status] += 1
        for of_status, reasons in (("refused rightly", self.refusals), ("not asked", self.unasked)):
            if status == of_status:
                reasons.setdefault(op, Counter())[message] += 1

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
