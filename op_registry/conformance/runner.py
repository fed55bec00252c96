"""Runs the laws over many operators in worker processes, and writes the reports to a file.

A worker that crashes or hangs loses only its current operator: the trial is reported, and a new worker is started.
An interrupted run resumes where it stopped, provided that settings and sources are unchanged.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from multiprocessing.sharedctypes import SynchronizedString
from pathlib import Path
from typing import Any, cast

import torch

from op_registry.conformance.report import Outcome, Report
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trials import Settings, run_operator
from op_registry.progress import Bar

# A process is replaced after this many operators, when torch's caches of graphs and kernels have grown to gigabytes.
MOST_OPERATORS = 500
# The size of the buffer for the repro line of a worker's current trial.
LINE_LENGTH = 1024
# Seconds that a worker may take to import torch, in addition to the time limit of its first operator.
START = 180.0


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


class _Worker:
    """A process that runs operators one after another, and the repro line of its current trial."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        self.current_line = cast(SynchronizedString, context.Array("c", LINE_LENGTH))
        self.timeout = timeout
        self.process = context.Process(target=_work, args=(worker_end, self.current_line, settings), daemon=True)
        self.process.start()
        worker_end.close()
        self.operator: str | None = None
        self.deadline = float("inf")
        self.started = False
        self.served = 0

    def give(self, operator: str) -> None:
        self.operator = operator
        self.served += 1
        self.current_line.value = b""
        self.connection.send(operator)
        self.deadline = time.monotonic() + self.timeout + START
        self.started = False

    def overdue(self) -> bool:
        """Whether the operator exceeded its time limit, counted from its first trial."""
        if not self.started and self.current_line.value:
            self.started = True
            self.deadline = time.monotonic() + self.timeout
        return time.monotonic() > self.deadline

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def lost(self, why: str) -> Report:
        """The report on an operator whose worker crashed or hung."""
        assert self.operator is not None
        line = self.current_line.value.decode()
        law = line.partition("--law ")[2].partition(" ")[0] or "P1"
        report = Report(self.operator, {law: {"error": 1}})
        report.outcomes.append(Outcome(law, "", "error", why, line))
        return report


def _work(
    connection: multiprocessing.connection.Connection[Any, Any], current_line: SynchronizedString, settings: Settings
) -> None:
    """The main loop of a worker."""
    torch.set_num_threads(1)
    for module in settings.modules:
        importlib.import_module(module)

    def say(line: str) -> None:
        current_line.value = line.encode()[: LINE_LENGTH - 1]

    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        try:
            report = run_operator(name, settings, say)
        except Exception as error:
            # A sample generator or the harness itself failed: report it as this operator's error, and go on.
            report = Report(name, {"P1": {"error": 1}})
            report.outcomes.append(Outcome("P1", "", "error", f"{type(error).__name__}: {error}"[:300], ""))
        connection.send(report)


def _in_workers(operators: Sequence[str], settings: Settings, workers: int, timeout: float) -> Iterable[Report]:
    waiting = list(reversed(operators))
    pool = [_Worker(settings, timeout) for _ in range(min(workers, len(waiting)))]
    try:
        while pool:
            for position, worker in enumerate(pool):
                if worker.operator is None and waiting:
                    worker.give(waiting.pop())
                elif worker.operator is None:
                    worker.stop()
                    pool[position] = None  # type: ignore[call-overload]
            pool = [worker for worker in pool if worker is not None]
            multiprocessing.connection.wait([w.connection for w in pool], timeout=1.0)
            for position, worker in enumerate(pool):
                report = _reported(worker)
                if report is None:
                    continue
                yield report
                alive = worker.process.is_alive() and worker.deadline != float("-inf")
                if alive and worker.served < MOST_OPERATORS:
                    worker.operator = None
                else:
                    worker.stop()
                    pool[position] = _Worker(settings, timeout)
    finally:
        for worker in pool:
            worker.stop()


def _reported(worker: _Worker) -> Report | None:
    """The finished report, a report of a crash or a timeout, or None while the worker is running."""
    try:
        if worker.connection.poll():
            return worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        worker.deadline = float("-inf")
        return worker.lost(f"the process died with exit code {worker.process.exitcode}")
    if worker.overdue():
        worker.deadline = float("-inf")
        return worker.lost(f"not finished after {worker.timeout:g} s")
    return None
