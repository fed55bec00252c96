"""Which failures of an operator its named gaps cover, and which of these gaps no longer fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from op_registry.conformance.gaps import covers
from op_registry.conformance.report import Status
from op_registry.rule import Gap

# A call to compare a failure with: says how that call fails too, or returns None.
Control = Callable[[], "str | None"]


class GapTracker:
    """The gaps of an operator, with a record of which gaps trials tested and which still fail."""

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.gaps = gaps
        self.tested: set[int] = set()
        self.failed: set[int] = set()

    def judged(
        self, law: str, description: str, status: Status, message: str, control: Control | None = None
    ) -> tuple[Status, str]:
        """A trial's outcome, with the status "gap" if a gap covers its failure.

        control  runs beside every failure; if it does not fail, an upstream gap covers nothing
        """
        covering = [n for n, gap in enumerate(self.gaps) if covers(gap, law, description)]
        if status != "not asked":
            self.tested.update(covering)
        if status not in ("broken", "error", "refused"):
            return status, message
        theirs = control() if control is not None else None
        if theirs is not None:
            message += f"; torch's own TwoTensor fails too: {theirs}"
        if not covering:
            return status, message
        self.failed.update(covering)
        gap = self.gaps[covering[0]]
        if gap.upstream and theirs is None:
            return "broken", f"{message}; named as torch's failure, but torch's own TwoTensor does not fail: {gap}"
        return "gap", f"{gap.why} ({message})"

    def closed(self) -> list[Gap]:
        """Gaps that were tested and no longer fail."""
        return [self.gaps[n] for n in sorted(self.tested - self.failed)]
