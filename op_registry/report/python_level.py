"""How torch's Python-level callables are supported: ``python -m op_registry coverage --python-level``.

Each is *right* (the tested laws hold), *refused* (with the reason), *not applicable* (with the reason), or *wrong*.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from op_registry.conformance import python_calls as calls
from op_registry.conformance import python_distributions as distributions
from op_registry.conformance import python_level as names
from op_registry.conformance.python_level import Outcome, put_to_the_laws
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject, find_subject
from op_registry.laws.inside import rules_inside_functions
from op_registry.progress import progress
from op_registry.report.coverage import Entry, table

STATES = ("right", "refused", "not applicable", "wrong")


def _entry(name: str, state: str, note: str) -> Entry:
    """How one callable is supported. Its family: ``nn.functional``, ``distributions`` …; ``nn`` for modules."""
    return Entry(name, state, note, "distributions" if name.startswith("distributions.") else name.rpartition(".")[0])


def reason_not_called(name: str) -> str | None:
    """Why a callable is not called, if it is not."""
    group, _, last = name.rpartition(".")
    if last in names.NO_FUNCTIONS:
        return names.NO_FUNCTIONS[last]
    if group == "nn" and last in calls.MODULES_NOT_CALLED:
        return calls.MODULES_NOT_CALLED[last]
    if group == "signal.windows":
        return "makes a tensor of numbers"
    reasons = calls.NOT_CALLED | distributions.NOT_CALLED
    return reasons.get(name) or reasons.get(group)


def samples_of(name: str) -> list[Sample]:
    """Sample calls of a callable."""
    if name.startswith("distributions."):
        return distributions.samples_of_distribution(name)
    group, _, last = name.rpartition(".")
    return calls.samples_of_module(last) if group == "nn" else calls.samples_of_function(name)


def entry_of(name: str, subject: Subject | None = None) -> Entry:
    """Test one callable, and return how it is supported."""
    why = reason_not_called(name)
    if why is not None:
        return _entry(name, "not applicable", why)
    subject, outcome = subject or find_subject(), Outcome()
    samples = samples_of(name)
    for sample in samples:
        put_to_the_laws(subject, sample, outcome, calls.NUMBERED.get(name, 1), name in calls.OWN_VALUES)
    if name in calls.MUST_REFUSE and "P3" in outcome.held:
        outcome.failures.append("P8: answers for a partly valid matrix, which is to be refused")
    return _entry(name, outcome.state, _note(outcome, samples))


def _note(outcome: Outcome, samples: Sequence[Sample]) -> str:
    if outcome.failures:
        return "; ".join(dict.fromkeys(outcome.failures))
    if not outcome.ran:
        return "plain torch has no such call" if samples else "no sample"
    laws = " ".join(sorted(outcome.held))
    refused = _first_sentence(outcome.refusals[0]) if outcome.refusals else ""
    return f"{laws}, refuses some: {refused}" if laws and refused and outcome.state == "right" else refused or laws


def _first_sentence(text: str) -> str:
    named = re.sub(r"^(\S+) \(\S+\)", r"\1", text.splitlines()[0])  # torch.unique (unique_dim) …
    return named.split(" (")[0].partition(". ")[0][:120]


def entries(subject: Subject | None = None, only: Iterable[str] | None = None) -> list[Entry]:
    """Every callable, or those named."""
    subject = subject or find_subject()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules without parameters, deprecated functions
        called = list(names.all_names() if only is None else only)
        return [entry_of(name, subject) for name in progress(called, len(called), "callable")]


def report(entries: Sequence[Entry], verbose: bool = False) -> str:
    """The whole of ``python -m op_registry coverage --python-level``."""
    shown = [entry for entry in entries if verbose or entry.state in ("refused", "wrong")]
    return "\n".join([table(entries, "Python callables", STATES), "", *map(str, shown), "", _rules()])


def as_values(entries: Iterable[Entry]) -> dict[str, Any]:
    """The same as values."""
    return {"callables": [{"name": entry.name, "state": entry.state, "note": entry.note} for entry in entries]}


def _rules() -> str:
    """The rules that hold inside single functions."""
    rules = sorted(f"{rule.function_name}: {rule.name}" for rule in rules_inside_functions())
    return "\n".join(["rules inside functions", *(f"    {rule}" for rule in rules)])


def expectation(entries: Sequence[Entry]) -> str:
    """The content of tests/report/python_level.expect: a line for each callable, and the rules inside functions."""
    return "\n".join([*sorted(map(str, entries)), "", _rules()])
