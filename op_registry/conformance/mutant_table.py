"""The tables of mutants: ways of being wrong × the operators of an invented library, and × every built-in rule."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from op_registry.conformance.mutant_operators import RULES
from op_registry.conformance.mutant_ways import WAYS
from op_registry.conformance.mutants import EQUIVALENT, Fate, Mutant, built_in_fates, strangers_fates
from op_registry.conformance.samples import entries_by_overload, overloads_called
from op_registry.laws.categories import COMPOSITE
from op_registry.progress import progress
from op_registry.registry import registry
from op_registry.rule import Rule

# How many entries of torch's database test the mutants of a built-in rule: those that call the fewest other operators.
MOST_ENTRIES = 1
MARKS = {"same": "·", "equivalent": "≡", "survived": "!!"}


@dataclass(frozen=True)
class Job:
    """The mutants of one rule: that of an operator of mutant_operators, or a built-in one with entries that call it."""

    rule: str
    category: str
    entries: tuple[str, ...] = ()

    def fates(self, ways: Sequence[str] | None) -> list[Fate]:
        """Run the laws on all mutants."""
        torch.set_num_threads(1)
        if self.entries:
            return built_in_fates(self.rule, self.entries, ways)
        return strangers_fates(self.rule, ways)


def strangers() -> list[Job]:
    """A job for each operator of the invented library."""
    return [Job(kind, kind) for kind in RULES]


def built_in() -> tuple[list[Job], list[Rule]]:
    """A job for each built-in rule that an entry of torch's database calls, and the rules that none calls.

    Composite rules are left out: they are written in other operators, whose rules have mutants of their own.
    """
    callers = entries_by_overload()
    rules = {id(rule): rule for op in registry if (rule := registry.get(op)) is not None}
    jobs, uncalled = [], []
    for rule in rules.values():
        if rule.category is COMPOSITE:
            continue
        called = [(op, entry) for op in rule.ops for entry in callers.get(op, ())]
        if not called:
            uncalled.append(rule)
            continue
        called.sort(key=lambda pair: len(overloads_called(pair[1])))
        entries = tuple(dict.fromkeys(entry for _, entry in called))[:MOST_ENTRIES]
        jobs.append(Job(str(called[0][0]), rule.category.name, entries))
    return jobs, uncalled


def run(jobs: Sequence[Job], ways: Sequence[str] | None, workers: int | None) -> list[tuple[Job, list[Fate]]]:
    """Every job's fates, in order. A job whose process dies is run again alone, and then reported as a survivor."""
    if workers == 0:
        return [(job, job.fates(ways)) for job in jobs]
    fates = dict(_in_pool(jobs, ways, workers or os.cpu_count() or 1))
    for job in jobs:
        if job not in fates:
            fates |= dict(_in_pool([job], ways, 1))
    message = "its process died"
    return [(job, fates.get(job) or [Fate(Mutant(job.rule, "any"), "survived", message=message)]) for job in jobs]


def _in_pool(jobs: Sequence[Job], ways: Sequence[str] | None, workers: int) -> Iterator[tuple[Job, list[Fate]]]:
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
        futures: dict[Future[list[Fate]], Job] = {pool.submit(job.fates, ways): job for job in jobs}
        for future in progress(as_completed(futures), len(jobs), "rule"):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:  # noqa: PERF203
                continue


# ----------------------------------------------------------------------------------------------------------- as text


def grid(results: Sequence[tuple[Job, list[Fate]]], sparse: bool) -> str:
    """A row for each way and a column for each operator: the law that kills the mutant, or a mark (MARKS)."""
    columns = [(job, {f.mutant.way: f for f in fates if f.mutant.sparse is sparse}) for job, fates in results]
    columns = [(job, fates) for job, fates in columns if fates]
    if not columns:
        return ""
    title = "on sparse records" if sparse else "the dense run"
    lines = [f"{title}: way of being wrong × operator", "", *_legend([job.rule for job, _ in columns]), ""]
    lines.append(" " * 42 + "".join(f"{n:>5d}" for n in range(1, len(columns) + 1)))
    for way in WAYS:
        cells = [_cell(fates.get(way)) for _, fates in columns]
        if any(cells):
            lines.append(f"{way:42s}" + "".join(f"{cell:>5s}" for cell in cells))
    return "\n".join(lines)


def _legend(names: Sequence[str]) -> list[str]:
    return [f"{n:4d}  {name}" for n, name in enumerate(names, 1)]


def _cell(fate: Fate | None) -> str:
    if fate is None:
        return ""
    return "!!" if fate.alarming else MARKS.get(fate.state, fate.law)


def counts(results: Sequence[tuple[Job, list[Fate]]]) -> str:
    """A row for each category of rules: how many mutants were killed, changed nothing, are equivalent, survived."""
    by_category: dict[str, Counter[str]] = {}
    for job, fates in results:
        by_category.setdefault(job.category, Counter()).update(Counter(fate.state for fate in fates))
    states = ("killed", "same", "equivalent", "survived")
    head = f"{'category':22s}" + "".join(f"{state:>12s}" for state in states)
    total = sum(by_category.values(), Counter())
    rows = [*sorted(by_category.items()), ("all", total)]
    return "\n".join([head, *(f"{name:22s}" + "".join(f"{c[s]:12d}" for s in states) for name, c in rows)])


def killers(results: Sequence[tuple[Job, list[Fate]]]) -> str:
    """How many mutants each law was the first to kill."""
    by_law = Counter(fate.law for _, fates in results for fate in fates if fate.state == "killed")
    return "killed by " + ", ".join(f"{law}: {n}" for law, n in sorted(by_law.items()))


def alarms(results: Sequence[tuple[Job, list[Fate]]]) -> list[str]:
    """Mutants that survived, and mutants named as equivalent that were killed."""
    return [
        f"{f.mutant} {f.state}{f' by {f.law}' if f.law else ''}{f': {f.message}' if f.message else ''}"
        for _, fates in results
        for f in fates
        if f.alarming
    ]


@dataclass(frozen=True)
class Results:
    """The fates of all mutants.

    strangers  fates for the operators of the invented library
    built_in   fates for the built-in rules; None: not run
    uncalled   the built-in rules that no entry of torch's database calls; their mutants did not run
    """

    strangers: list[tuple[Job, list[Fate]]] | None
    built_in: list[tuple[Job, list[Fate]]] | None
    uncalled: tuple[str, ...] = ()

    @property
    def alarms(self) -> list[str]:
        """The mutants that are not accounted for."""
        return [*alarms(self.strangers or []), *alarms(self.built_in or [])]

    def __str__(self) -> str:
        parts: list[str] = []
        if self.strangers is not None:
            found = self.strangers
            parts += [grid(found, sparse=False), grid(found, sparse=True), counts(found), killers(found)]
        if self.built_in is not None:
            number = len(self.built_in)
            parts.append(f"{number} built-in rules, each tested with an entry of torch's database that calls it")
            parts += [counts(self.built_in), killers(self.built_in)]
            names = ", ".join(sorted(self.uncalled))
            parts.append(f"{len(self.uncalled)} rules that no entry calls, whose mutants were not tested: {names}")
        parts.append("law: the first to notice the mutant; ·: it changes nothing observable; ≡: no law may notice it:")
        parts += [f"    {way}: {why}" for way, why in EQUIVALENT.items()]
        alarming = self.alarms
        parts.append("\n".join(["no survivors"] if not alarming else ["!! not accounted for:", *alarming]))
        return "\n\n".join(filter(None, parts))


def results(kinds: bool, rules: bool, ways: Sequence[str] | None, workers: int | None) -> Results:
    """Run the mutants of the invented library (`kinds`), and of the built-in rules (`rules`)."""
    of_strangers = run(strangers(), ways, workers) if kinds else None
    if not rules:
        return Results(of_strangers, None)
    jobs, uncalled = built_in()
    return Results(of_strangers, run(jobs, ways, workers), tuple(rule.name for rule in uncalled))
