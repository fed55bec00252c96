"""Mutants: right rules made wrong on purpose, in one way at a time, and which law notices each.

    killed      a law is broken, or is undecided although the right rule's is not
    same        the way never changed anything observable, in any call of any trial: it does not fit the rule
    equivalent  it changes something that no law may notice, for a stated reason (EQUIVALENT)
    survived    none of these: a law is missing

A mutant that is listed in EQUIVALENT and killed all the same is a failure, and so is one that never ran. The rules are
the built-in ones, each tested with an entry of torch's database that calls it and few other operators.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.conformance import masks, plain_torch
from op_registry.conformance.mutant_ways import WAYS, Changes, Restated, Way
from op_registry.conformance.sample import Operator
from op_registry.conformance.samples import (
    DirectOperator,
    database,
    entries_by_overload,
    overload_named,
    overloads_called,
)
from op_registry.conformance.trials import Settings, run_operator
from op_registry.conformance.verdict import Report, answer_of
from op_registry.dimensions.movements import Unknown
from op_registry.laws.categories import COMPOSITE
from op_registry.progress import progress
from op_registry.registry import registry
from op_registry.rule import Rule
from op_registry.schema import is_view
from op_registry.sparse.lowering import lowering_of, run_sparsely
from op_registry.sparse.permuted import Permuted
from op_registry.sparse.record import NotLowered, Sparse
from op_registry.workers import Lost, in_processes

# Cheap laws first: the first law to notice a mutant ends its test.
LAWS = ("P1", "P2", "P3", "P8", "P5", "P6", "P4", "P7")
# The laws that test storages other than dense.
STORED_LAWS = ("P4", "P3", "P5")
# The laws that compile.
EXPENSIVE = ("P7",)
# How many samples are inspected to find out whether a way of being wrong fits.
TRIED = 12
# The most samples for mutants that survive the first run.
THOROUGH = 16

# Ways of being wrong that no law may notice, each with the proof.
EQUIVALENT: dict[str, str] = {
    "NaN under the result's mask": (
        "the data under a result's mask has no meaning and is never observed: P2 compares valid elements, and P3 "
        "requires that no operator applied to the result depends on it"
    ),
}


# Traits that say what a rule's run does, for fast paths that do it without calling it.
OF_THE_RUN: dict[str, Any] = {"identity": None, "divided": False}

# Ways that change nothing but values, or forget masks.
OF_VALUES = (
    "forgets the first operand's mask",
    "forgets the other operands' masks",
    "values off by one",
    "values of scalars off by one",
    "values off by one in part of the calls",
    "sevens for holes",
    "zeros for holes",
    "remembers the first call",
    "another value when compiled",
    "garbage leaks into values",
    "hidden NaN leaks",
)


@dataclass(frozen=True)
class Mutant:
    """A rule, or its run on sparse records, that is wrong in one way."""

    # An overload of the rule.
    rule: str
    way: str
    sparse: bool = False

    def __str__(self) -> str:
        return f"{self.rule}{' (sparse)' if self.sparse else ''}: {self.way}"


@dataclass(frozen=True)
class Fate:
    """The result of testing a mutant: "killed" (by which law), "same", "equivalent" or "survived"."""

    mutant: Mutant
    state: str
    law: str = ""
    message: str = ""
    calls: int = 0
    # Whether the mutant is listed in EQUIVALENT.
    named: bool = False

    @property
    def alarming(self) -> bool:
        """Whether a law is missing, or EQUIVALENT is wrong."""
        return self.state == "survived" or (self.named and self.state == "killed")


@contextlib.contextmanager
def installed(rule: Rule, way: Way, sparse: bool) -> Iterator[Changes]:
    """Within the block, `rule` is wrong in this way, for the caller only. Yields counts of its calls and changes."""
    changes = Changes()
    if way.restate is not None:
        dims = Restated(rule.dims or Unknown("nothing is stated"), way.restate, changes)
        restated = dataclasses.replace(rule, traits=dataclasses.replace(rule.traits, dims=dims), listeners=[])
        with registry.overlay() as overlay:
            overlay.replace(restated)
            yield changes
        return

    def right(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return rule.bind(op)(*args, **kwargs)

    memory: dict[OpOverload, Callable[..., Any]] = {}

    def wrong(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if op not in memory:
            memory[op] = way.mutated(rule.bind(op), changes)
        return memory[op](*args, **kwargs)

    def lowered(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if op not in memory:
            memory[op] = way.mutated(lambda *a, **k: run_sparsely(op, rule, a, k), changes)
        changed = changes.changed
        try:
            return memory[op](*args, **kwargs)
        except NotLowered:
            changes.changed = changed  # the right rule makes this call, on dense storage
            raise

    # A new run function without known traits, because fast paths would bypass a known run.
    traits = dataclasses.replace(rule.traits, **OF_THE_RUN)
    lowerings: dict[type, Any] = dict(rule.lowerings)
    if sparse:
        lowerings = {record: lowered for record in (Sparse, Permuted) if lowering_of(rule, record) is not None}
    run = right if sparse else wrong
    category = dataclasses.replace(rule.category, by_rows=False) if rule.category.by_rows else rule.category
    mutant = dataclasses.replace(
        rule, run=run, takes_op=True, category=category, traits=traits, lowerings=lowerings, listeners=[]
    )
    with registry.overlay() as overlay:
        overlay.replace(mutant)
        yield changes


def fate_of(mutant: Mutant, rule: Rule, operators: Sequence[Operator], baseline: Baseline, settings: Settings) -> Fate:
    """Run the laws on operators that call a mutated rule, until one of them is broken."""
    way = WAYS[mutant.way]
    # The mutated result of a view operator is new data, which no longer aliases its operand: P6 notices that.
    named = mutant.way in EQUIVALENT and not any(is_view(op) for op in rule.ops)
    # Only the overload itself counts: others that an entry of the database calls may have nonzero derivatives.
    direct = [o for o in operators if isinstance(o, DirectOperator)] or operators
    if "P5" in way.laws and not any(baseline.derivative(o, "second" in way.name) for o in direct):
        return Fate(mutant, "same", message="the derivative is zero, so that doubling or cutting it changes nothing")
    if way.restate is not None and (rule.dims is None or isinstance(rule.dims, Unknown)):
        return Fate(mutant, "same", message="nothing is stated")
    with installed(rule, way, mutant.sparse) as changes:
        for thorough in (False, True):
            fate = _tried(mutant, operators, _thorough(settings) if thorough else settings, baseline, changes)
            if fate is not None:
                return dataclasses.replace(fate, calls=changes.calls, named=named)
            if mutant.way in EQUIVALENT:
                break
        if way.laws and not any(baseline.decision(o, law, settings) == "holds" for o in operators for law in way.laws):
            return Fate(mutant, "same", message="the law cannot test the right rule either", calls=changes.calls)
    if mutant.way in EQUIVALENT or _about_unspecified_values(way, rule, operators):
        return Fate(mutant, "equivalent", calls=changes.calls, named=named)
    return Fate(mutant, "survived", calls=changes.calls, named=named)


def _about_unspecified_values(way: Way, rule: Rule, operators: Sequence[Operator]) -> bool:
    """Whether a way changes only values that torch leaves unspecified, which P1 doesn't compare either.

    These are uninitialised memory, and the random numbers drawn in a compiled graph.
    """
    if way.name == "another value when compiled" and any(_draws(op) for op in rule.ops):
        return True
    samples = [s for o in operators for s in o.samples(o.preferred_dtype)[:TRIED] if s.tensors]
    return way.name in OF_VALUES and bool(samples) and all(sample.valueless for sample in samples)


def _draws(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _thorough(settings: Settings) -> Settings:
    """For mutants that survive the first run: more samples, every mask."""
    return dataclasses.replace(settings, most=THOROUGH, most_stored=THOROUGH, masks=masks.KINDS)


def _tried(
    mutant: Mutant, operators: Sequence[Operator], settings: Settings, baseline: Baseline, changes: Changes
) -> Fate | None:
    """Run the laws on an installed mutant; None if no law notices it."""
    for laws in _stages(WAYS[mutant.way], settings):
        for operator in operators:
            killed = _killed(mutant, operator, dataclasses.replace(settings, laws=laws), baseline)
            if killed is not None:
                return killed
        if not changes.changed:
            return Fate(mutant, "same")  # the first laws make every kind of call
    return None


def _killed(mutant: Mutant, operator: Operator, settings: Settings, baseline: Baseline) -> Fate | None:
    report = run_operator(operator, settings)
    for law in settings.laws:
        answer = answer_of(report, law)
        if answer.decision in ("broken", "undecided") and baseline.decision(operator, law, settings) != answer.decision:
            first = answer.failures[0].message if answer.failures else answer.reason
            return Fate(mutant, "killed", law, first)
        if answer.decision == "broken":
            return None  # the right rule breaks it too, and the later laws did not run (until_broken)
    return None


def _stages(way: Way, settings: Settings) -> Iterator[tuple[str, ...]]:
    """The laws in the order in which they run: the way's own (or the first two), the other cheap ones, the rest."""
    if way.restate is not None:
        yield way.laws
        return
    first = [law for law in way.laws or settings.laws[:2] if law in settings.laws]
    others = [law for law in settings.laws if law not in first]
    cheap, expensive = ([law for law in others if (law in EXPENSIVE) == costly] for costly in (False, True))
    yield from (tuple(laws) for laws in (first, cheap, expensive) if laws)


class Baseline:
    """The right rules' answers: a law that is broken or undecided for them kills no mutant."""

    def __init__(self) -> None:
        self._scope = registry.scope
        self._reports: dict[tuple[str, str, int | None], Report] = {}

    def decision(self, operator: Operator, law: str, settings: Settings) -> str:
        """The right rule's answer, also while a mutant is installed: it runs in the registry scope from before."""
        key = operator.name, law, settings.most
        if key not in self._reports:
            with registry.within(self._scope):
                self._reports[key] = run_operator(operator, dataclasses.replace(settings, laws=(law,)))
        return answer_of(self._reports[key], law).decision

    def derivative(self, operator: Operator, second: bool) -> bool:
        """Whether the first (or second) derivative of some sample is nonzero in plain torch."""
        dtype = operator.gradient_dtype
        samples = [s for s in operator.samples(dtype) if s.tensors][:TRIED] if dtype is not None else []
        derivatives = [plain_torch.derivative(sample) for sample in samples]
        return any(derivative.curved if second else derivative.sloped for derivative in derivatives)


# Seconds for all mutants of a rule, and after how many rules a process is replaced.
TIMEOUT, MOST_JOBS = 1800.0, 100
DENSE = Settings(
    laws=LAWS,
    most=4,
    most_stored=1,
    masks=("unstored", "half", "slices", "empty", "half_first", "rows"),
    until_broken=True,
)
SPARSE = dataclasses.replace(DENSE, laws=STORED_LAWS, also_stored=("csr", "bsr"), storages=("csr", "bsr"))


@dataclass(frozen=True)
class Job:
    """The mutants of one built-in rule, by an overload, tested with entries of torch's database that call it."""

    rule: str
    entries: tuple[str, ...]

    def fates(self, ways: Sequence[str] | None = None) -> list[Fate]:
        """Run the laws on every mutant: of the dense run, and of the sparse run if there is one."""
        torch.set_num_threads(1)
        op = overload_named(self.rule)
        rule = registry.get(op)
        assert rule is not None
        callers = [database()[entry] for entry in self.entries]
        operators = [*callers, *(DirectOperator(op, caller) for caller in callers)]
        lowered = any(lowering_of(rule, record) is not None for record in (Sparse, Permuted))
        baselines = {False: Baseline(), True: Baseline()}
        # (A rule states its dimensions once, whatever the storage.)
        return [
            fate_of(Mutant(self.rule, way, sparse), rule, operators, baselines[sparse], SPARSE if sparse else DENSE)
            for sparse in ((False, True) if lowered else (False,))
            for way in ways or WAYS
            if not (sparse and WAYS[way].restate is not None)
        ]


def jobs_of(entries: Iterable[str]) -> list[Job]:
    """A job for each rule that these entries call, but for composite ones: they are written in other operators."""
    jobs: dict[int, Job] = {}
    for entry in entries:
        for op in overloads_called(entry):
            rule = registry.get(op)
            if rule is not None and rule.category is not COMPOSITE:
                jobs.setdefault(id(rule), Job(str(op), (entry,)))
    return list(jobs.values())


def all_jobs() -> tuple[list[Job], list[str]]:
    """A job for each built-in rule that an entry of torch's database calls, and the names of rules that none calls."""
    callers = entries_by_overload()
    rules = {id(rule): rule for op in registry if (rule := registry.get(op)) is not None}
    jobs, uncalled = [], []
    for rule in rules.values():
        called = [(op, entry) for op in rule.ops for entry in callers.get(op, ())]
        if rule.category is COMPOSITE:
            continue
        if not called:
            uncalled.append(rule.name)
            continue
        # Of the entries, the one that calls the fewest other operators.
        op, entry = min(called, key=lambda pair: len(overloads_called(pair[1])))
        jobs.append(Job(str(op), (entry,)))
    return jobs, sorted(uncalled)


def run(jobs: Sequence[Job], ways: Sequence[str] | None, workers: int | None) -> list[Fate]:
    """The fates of all mutants, in order. A job whose process dies or hangs is reported as a survivor."""
    if workers == 0:
        return [fate for job in jobs for fate in job.fates(ways)]
    answers = in_processes(functools.partial(_answer, ways), jobs, workers or os.cpu_count() or 1, TIMEOUT, MOST_JOBS)
    fates: dict[Job, list[Fate]] = {}
    for answer in progress(answers, len(jobs), "rule"):
        if isinstance(answer, Lost):
            fates[answer.item] = [Fate(Mutant(answer.item.rule, "any"), "survived", message=answer.why)]
        else:
            fates |= dict([answer])
    return [fate for job in jobs for fate in fates[job]]


def _answer(ways: Sequence[str] | None, job: Job, say: Callable[[str], None]) -> tuple[Job, list[Fate]]:
    say(job.rule)
    return job, job.fates(ways)


def alarms(fates: Sequence[Fate]) -> list[str]:
    """Mutants that survived, and mutants named as equivalent that were killed."""
    return [
        f"{f.mutant} {f.state}{f' by {f.law}' if f.law else ''}{f': {f.message}' if f.message else ''}"
        for f in fates
        if f.alarming
    ]


def summary(fates: Sequence[Fate], uncalled: Sequence[str] = ()) -> str:
    """How many mutants were killed, and by which law; those not accounted for; rules whose mutants did not run."""
    states, laws = Counter(f.state for f in fates), Counter(f.law for f in fates if f.state == "killed")
    rules = len({f.mutant.rule for f in fates})
    lines = [
        f"{len(fates)} mutants of {rules} rules: {states['killed']} killed, {states['same']} change nothing "
        f"observable, {states['equivalent']} equivalent, {states['survived']} survived",
        "killed by " + ", ".join(f"{law}: {n}" for law, n in sorted(laws.items())),
        *(f"equivalent, as no law may notice it: {way}: {why}" for way, why in EQUIVALENT.items()),
    ]
    if uncalled:
        lines.append(f"{len(uncalled)} rules that no entry calls, whose mutants were not tested: {', '.join(uncalled)}")
    return "\n".join([*lines, *(["not accounted for:", *alarms(fates)] if alarms(fates) else ["no survivors"])])
