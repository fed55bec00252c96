"""What came of an operator's trials: counts for each law, each trial that did not pass, and why laws were not asked."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What came of one trial that did not pass."""

    law: str
    description: str
    status: str
    message: str
    repro: str


@dataclass
class Report:
    """Everything about one operator: how many trials of each law came out how, and those that did not pass."""

    operator: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    # Of each law, why trials had nothing to say about it, and how many.
    silences: dict[str, dict[str, int]] = field(default_factory=dict)
    # Laws that do not apply to the operator, and why not.
    exemptions: dict[str, str] = field(default_factory=dict)
    # How many trials in each dtype came out how.
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    # How many trials of P4 in each storage came out how.
    storages: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Outcome]:
        """Broken laws and unexpected errors, outside of named gaps."""
        return [o for o in self.outcomes if o.status in ("broken", "error")]

    def count(self, status: str) -> int:
        """How many trials of all laws came out so."""
        return sum(c.get(status, 0) for c in self.counts.values())

    def add(self, other: Report) -> None:
        """Take in what came of other trials of the same operator."""
        both = (
            (self.counts, other.counts),
            (self.dtypes, other.dtypes),
            (self.storages, other.storages),
            (self.silences, other.silences),
        )
        for mine, theirs in both:
            for key, counts in theirs.items():
                mine[key] = dict(Counter(mine.get(key, {})) + Counter(counts))
        self.outcomes += other.outcomes
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.seconds += other.seconds
        exempt = self.exemptions | other.exemptions
        self.exemptions = {law: why for law, why in exempt.items() if not self.asked(law)}

    def asked(self, law: str) -> int:
        """How many trials had something to ask."""
        return sum(n for status, n in self.counts.get(law, {}).items() if status != "not asked")

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> Report:
        """From the results file."""
        outcomes = [Outcome(**o) for o in kept.pop("outcomes")]
        return cls(**kept, outcomes=outcomes)
