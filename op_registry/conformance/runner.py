"""Run the laws on one operator, in this process; or over many, in worker processes, with a file of their reports.

A worker that crashes or hangs loses only its current operator: the trial is reported, and a new worker is started.
An interrupted run resumes where it stopped, provided that settings and sources are unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.samples import operators_of
from op_registry.conformance.subject import find_subject
from op_registry.conformance.trials import ALL_LAWS, Settings, run_operator
from op_registry.conformance.verdict import Outcome, Report, Verdict
from op_registry.progress import Bar
from op_registry.workers import Lost, in_processes

# The storages on which we test P3, P5 and "later" besides dense: one stores single elements, one stores blocks.
ALSO_STORED = ("csr", "bsr")


def check(
    op: OpOverload | OpOverloadPacket | Callable[..., Any] | str,
    *,
    subject: str | None = None,
    laws: Sequence[str] = ALL_LAWS,
    most: int | None = 4,
    seed: int = 0,
    allow: Mapping[str, str] | None = None,
    allow_broken: Mapping[str, str] | None = None,
) -> Verdict:
    """Run the laws on an operator: one of torch's, by overload, packet, function or name, or one of your own.

    op            the operator; for another library's operator, this runs every overload that has a rule, and its
                  in-place and out= forms
    subject       the masked tensor to test (see :func:`find_subject`)
    laws          P1 to P9, "dims" and "later"; the verdict says which of them don't apply to the operator
    most          the most samples of each operator, chosen for as many kinds of call as possible; None runs them all
    allow         laws that may be undecided, each with the reason: ``allow={"P7": "it has no fake implementation"}``
    allow_broken  laws that may be broken, each with the reason; to except single trials, use ``rule.gap``

    An unneeded allowance makes the verdict false. Samples of your own operator come from ``rule.samples``, or from its
    schema. Raises TypeError for an object that is no operator, LookupError for an operator without a rule or if there
    is no masked tensor to test, ValueError for an unknown law.
    """
    unknown = [law for law in (*laws, *(allow or {}), *(allow_broken or {})) if law not in ALL_LAWS]
    if unknown:
        raise ValueError(f"unknown law {', '.join(unknown)}; the laws are {', '.join(ALL_LAWS)}")
    settings = Settings(subject=subject, laws=tuple(laws), most=most, seed=seed, also_stored=ALSO_STORED)
    reports = tuple(run_operator(operator, settings) for operator in operators_of(op))
    return Verdict(reports, dict(allow or {}), dict(allow_broken or {}))


# A process is replaced after this many operators, when torch's caches of graphs and kernels have grown to gigabytes.
MOST_OPERATORS = 500


def fingerprint(settings: Settings) -> str:
    """A short digest of what results depend on: the settings, torch's version and the sources."""
    digest = hashlib.sha256(json.dumps([asdict(settings), torch.__version__]).encode())
    packages = {"op_registry", type(find_subject(settings.subject)).__module__.partition(".")[0]}
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            for source in sorted(Path(folder).rglob("*.py")):
                digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def kept_reports(path: Path, mark: str) -> dict[str, Report]:
    """The reports in a results file, if it was written by a run with the same fingerprint `mark`."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    if not lines or json.loads(lines[0]).get("fingerprint") != mark:
        return {}
    reports = {}
    for line in lines[1:]:
        try:
            report = Report.from_dict(json.loads(line))
        except json.JSONDecodeError:
            # The run was interrupted while it wrote this line.
            continue
        reports[report.operator] = report
    return reports


def run(
    operators: Sequence[str],
    settings: Settings,
    *,
    workers: int | None = None,
    timeout: float = 120.0,
    results: Path | None = None,
) -> list[Report]:
    """Reports for all `operators`, in their order; `results` is a file to which each is written as it arrives."""
    mark = fingerprint(settings)
    reports: dict[str, Report] = {}
    results_file = None
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        reports = {name: r for name, r in kept_reports(results, mark).items() if name in set(operators)}
        with results.open("w") as file:
            file.write(json.dumps({"fingerprint": mark, "settings": asdict(settings)}) + "\n")
            file.writelines(json.dumps(r.as_dict()) + "\n" for r in reports.values())
        results_file = results.open("a")
    todo = [name for name in operators if name not in reports]
    try:
        with Bar(len(operators), "op", done=len(operators) - len(todo)) as bar:
            for report in _in_workers(todo, settings, workers or os.cpu_count() or 1, timeout):
                reports[report.operator] = report
                if results_file is not None:
                    results_file.write(json.dumps(report.as_dict()) + "\n")
                    results_file.flush()
                failing = sum(bool(r.failures) for r in reports.values())
                bar.advance(f"{failing} failing, {report.operator}")
    finally:
        if results_file is not None:
            results_file.close()
    return [reports[name] for name in operators]


def _in_workers(operators: Sequence[str], settings: Settings, workers: int, timeout: float) -> Iterable[Report]:
    work = functools.partial(_reported, settings)
    for answer in in_processes(work, operators, workers, timeout, MOST_OPERATORS, settings.modules):
        yield _failed(answer.item, answer.why, answer.said) if isinstance(answer, Lost) else answer


def _reported(settings: Settings, operator: str, say: Callable[[str], None]) -> Report:
    try:
        return run_operator(operator, settings, say)
    except Exception as error:
        # A sample generator or the harness itself failed: report it as this operator's error, and go on.
        return _failed(operator, f"{type(error).__name__}: {error}"[:300], "")


def _failed(operator: str, why: str, line: str) -> Report:
    """The report on an operator that has no other; `line` is the repro line of its last trial, if there was one."""
    law = line.partition("--law ")[2].partition(" ")[0] or "P1"
    report = Report(operator, {law: {"error": 1}})
    report.outcomes.append(Outcome(law, "", "error", why, line))
    return report
