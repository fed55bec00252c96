"""Runs the laws over many operators in worker processes, and writes the reports to a file.

A worker that crashes or hangs loses only its current operator: the trial is reported, and a new worker is started.
An interrupted run resumes where it stopped, provided that settings and sources are unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from op_registry.conformance.report import Outcome, Report
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trials import Settings, run_operator
from op_registry.progress import Bar
from op_registry.workers import Lost, in_processes

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
