"""Which part of torch's operator database is tested, and what a failing test shows."""

from __future__ import annotations

import os
from collections.abc import Sequence

from op_registry.conformance.part import part
from op_registry.conformance.trials import Report


def asked_for(names: Sequence[str], variable: str, default: str) -> Sequence[str]:
    """The part K/N of names that an environment variable asks for."""
    return names[part(os.environ.get(variable, default))]


def failures(report: Report) -> str:
    """What a failing test shows: each failure once, with the line that repeats it."""
    shown = {(o.law, o.message): o for o in report.failures}
    return "\n".join(f"{o.law}, {o.description}: {o.message}\n    {o.repro}" for o in shown.values())
