"""The output of the commands with --json: the same results as values, with the version of torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.conformance.devices import Finding
from op_registry.conformance.mutants import Fate, alarms
from op_registry.conformance.trials import ALL_LAWS
from op_registry.conformance.verdict import Report, answer_of
from op_registry.registry import registry
from op_registry.report import coverage
from op_registry.report.coverage import Calls, Entry
from op_registry.report.explain import explain
from op_registry.report.names import UnknownName, named, operators_called, overloads_of
from op_registry.resolve import resolve
from op_registry.rule import in_dispatcher, takes_tensor


def text_of(command: str, fields: dict[str, Any]) -> str:
    """The JSON document of a command."""
    return json.dumps({"command": command, "torch": torch.__version__, **fields}, indent=1, ensure_ascii=False)


def of_coverage(calls: Sequence[Calls] | None) -> str:
    """How each entry of torch's database and each core overload is supported."""

    def fields(entry: Entry) -> dict[str, Any]:
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in entry.dtypes)
        kept = {"name": entry.name, "state": entry.state, "note": entry.note, "family": entry.family}
        return kept | ({"form": entry.form, "dtypes": dtypes} if dtypes else {})

    return text_of(
        "coverage",
        {
            "rules": len(registry),
            "measured": coverage.measured_how() if calls is None else "just now",
            "database": [fields(entry) for entry in coverage.entries(calls)],
            "core": [fields(entry) for entry in coverage.core_entries()],
        },
    )


def of_python_level(found: Iterable[Entry]) -> str:
    """How each function, module and distribution that torch writes in Python is supported."""
    callables = [{"name": entry.name, "state": entry.state, "note": entry.note} for entry in found]
    return text_of("coverage --python-level", {"callables": callables})


def of_explanation(name: str, samples: bool) -> str:
    """The text of `explain`, and the rule of each overload."""
    text = explain(name, samples=samples)
    return text_of("explain", {"name": name, "overloads": [_meaning(op) for op in _overloads(name)], "text": text})


def _overloads(name: str) -> list[OpOverload]:
    """The overloads that a name stands for: an operator's overloads, or those that an entry or a function calls."""
    try:
        target = named(name)
    except UnknownName:
        return list(coverage.known_calls()[name.replace(".", "_")].ops)
    operators: list[Any] = [target.operator] if target.operator is not None else []
    if target.function is not None:
        known = coverage.known_calls().get(target.name.removeprefix("torch.").replace(".", "_"))
        operators = [*known.ops] if known is not None and known.ops else [*operators_called(target.function)]
    found = []
    for op in operators:
        found += [each for each in overloads_of(op) if takes_tensor(each) and in_dispatcher(each)]
    return found


def _meaning(op: OpOverload) -> dict[str, Any]:
    """How an overload is served, and by which rule."""
    meaning = resolve(op)
    rule = meaning.rule
    fields: dict[str, Any] = {"overload": str(op), "state": coverage.state_of(op)}
    if rule is not None:
        fields |= {"rule": rule.name, "category": rule.category.name, "where": rule.where, "base": str(meaning.base)}
        fields["gaps"] = [str(gap) for gap in rule.gaps]
    return fields


def of_check(reports: Sequence[Report], holds: bool) -> str:
    """For each operator and law: the decision, the trials by status, and those that did not pass."""
    return text_of("check", {"holds": holds, "operators": [_report(report) for report in reports]})


def _report(report: Report) -> dict[str, Any]:
    laws = {}
    for law in ALL_LAWS:
        if law in report.counts or law in report.exemptions:
            answer = answer_of(report, law)
            laws[law] = {
                "decision": answer.decision,
                "reason": answer.reason,
                "trials": report.counts.get(law, {}),
                "failures": [
                    {"message": outcome.message, "sample": outcome.description, "repeat": outcome.repro}
                    for outcome in answer.failures
                ],
            }
    return {"operator": report.operator, "laws": laws, "seconds": round(report.seconds, 3)}


def of_devices(found: Iterable[Finding], device: str, skipped: str = "") -> str:
    """The finding for each entry on a device."""
    findings = [
        {"entry": each.entry, "of": each.what, "status": each.status, "reason": each.reason, "sample": each.sample}
        for each in found
    ]
    return text_of("check --device", {"device": device, "skipped": skipped, "findings": findings})


def of_mutants(fates: Sequence[Fate], uncalled: Sequence[str]) -> str:
    """The fate of each mutant, and the mutants that are not accounted for."""
    return text_of(
        "mutants",
        {
            "fates": [
                {
                    "rule": fate.mutant.rule, "way": fate.mutant.way, "sparse": fate.mutant.sparse, "state": fate.state,
                    "law": fate.law, "message": fate.message,
                }
                for fate in fates
            ],
            "uncalled": list(uncalled),
            "not_accounted_for": alarms(fates),
        },
    )  # fmt: skip
