"""Which part of torch's operator database is tested, and what a failing test shows."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from op_registry.conformance.samples import database, part
from op_registry.conformance.trials import Report
from repository import ROOT


def entries() -> list[str]:
    """The names of all entries. They are kept in a file: every worker collects, and the database loads for seconds."""
    kept = ROOT / f"build/entries-{torch.__version__}.txt"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text("\n".join(database()), encoding="utf-8")
        unfinished.rename(kept)
    return kept.read_text(encoding="utf-8").splitlines()


def asked_for(names: Sequence[str], variable: str, default: str) -> Sequence[str]:
    """The part K/N of names that an environment variable asks for."""
    return names[part(os.environ.get(variable, default))]


def failures(report: Report) -> str:
    """What a failing test shows: each failure once, with the line that repeats it."""
    shown = {(o.law, o.message): o for o in report.failures}
    return "\n".join(f"{o.law}, {o.description}: {o.message}\n    {o.repro}" for o in shown.values())
