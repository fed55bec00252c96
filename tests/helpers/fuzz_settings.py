"""How programs are drawn in tests: from the laws' choices, for the eager subject."""

from __future__ import annotations

from op_registry.conformance.subject import find_subject
from op_registry.fuzz.command import Settings
from op_registry.fuzz.generating import Choices

EAGER = "masked_dispatch.conformance_subject:eager"
P3 = Settings("P3", EAGER)


def choices(law: str = "P3") -> Choices:
    return Choices.for_law(law, find_subject(EAGER))
