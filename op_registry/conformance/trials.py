"""The trials of an operator, and their outcomes: in this process, or of many operators in worker processes.

A worker that crashes or hangs loses only its current operator: the trial is reported, and a new worker is started.
An interrupted run resumes where it stopped, provided that settings and sources are unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.conformance.gaps import GapTracker, gaps_of
from op_registry.conformance.law import Case, Check, CheckIn, Law, Option, Trial, observed, storage_of
from op_registry.conformance.laws import LAWS
from op_registry.conformance.laws.devices import on_device
from op_registry.conformance.masks import KINDS, ONE_HOLE, masking
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.reference_device import device_called
from op_registry.conformance.sample import Operator, Sample
from op_registry.conformance.samples import (
    NOT_ON_THIS_MACHINE,
    DatabaseOperator,
    chosen,
    entry_samples,
    left_to_others,
    operator_named,
    operators_of,
    overload_samples,
)
from op_registry.conformance.subject import Subject, find_subject
from op_registry.conformance.variations import asked_once, call_under, storable
from op_registry.conformance.verdict import Outcome, Report, Verdict
from op_registry.laws.categories import REFUSED
from op_registry.progress import Bar
from op_registry.records.fill import zeros_verified
from op_registry.workers import Lost, in_processes

# The laws of every device, and those that compare a device with the CPU.
ALL_LAWS = tuple(name for name, law in LAWS.items() if not law.of_devices)
OF_DEVICES = tuple(name for name, law in LAWS.items() if law.of_devices)
MODES = ("aot_eager", "aot_eager_dynamic", "inductor", "inductor_dynamic")
# The storages that P4 compares with dense: of every masked tensor, or with "_first" of the first one only.
STORAGES = ("coo", "csr", "csc", "bsr", "bsc", "hybrid", "packed", "time_first_packed", "csr_first", "packed_first")

# The most elements in the tensors of a sample. Each is tried hundreds of times; torch has sizes of thousands to
# millions for grid_sampler_3d (nn_functional_grid_sample has small ones in three dimensions), none for other operators.
MOST_ELEMENTS = 1 << 14
# How many samples of another library's operator are compiled.
MOST_COMPILED = 2
# The most samples that are tried for one with a valid result.
MOST_TRIED = 24


@dataclass(frozen=True)
class Settings:
    """The settings of a run: everything that its results depend on, so that an interrupted run can resume."""

    subject: str | None = None
    laws: tuple[str, ...] = ALL_LAWS
    # The most samples for each operator and dtype, chosen for as many kinds of call as possible; None is all of them.
    most: int | None = 4
    # The most of these that run on storages other than dense.
    most_stored: int | None = 4
    masks: tuple[str, ...] = KINDS
    # Names of dtypes by comma, "preferred" (float32 where the operator takes it), or "all" that the operator takes.
    # (P7 runs in the preferred dtype only: it is about graphs.)
    dtypes: str = "preferred"
    modes: tuple[str, ...] = ("aot_eager",)
    storages: tuple[str, ...] = STORAGES
    # The storages on which P3, P5 and "later" run in addition to dense (or instead of it, where `dense` is False).
    also_stored: tuple[str, ...] = ()
    dense: bool = True
    seed: int = 0
    # Run one sample only, by its number in the database.
    sample: int | None = None
    # Whether P7 compiles an entry's own function, and the overloads that it calls only if plain torch does not compile
    # the function; or the overloads alone.
    whole_entries: bool = False
    # Run P7 for an overload only in the first entry that calls it.
    each_overload_once: bool = False
    # Modules that register the rules of other libraries' operators: worker processes import them first.
    modules: tuple[str, ...] = ()
    # Stop at the first broken trial, which is enough to kill a mutant.
    until_broken: bool = False
    # The device that the subject computes on (reference_device.py); None is the CPU.
    device: str | None = None

    def find_subject(self) -> Subject:
        """The subject, on its device."""
        subject = find_subject(self.subject)
        return subject if self.device is None else on_device(subject, device_called(self.device))


def dtypes_of(operator: Operator, name: str, settings: Settings) -> list[torch.dtype]:
    """The dtypes in which a law is tested."""
    law = LAWS[name]
    if law.of_gradients:
        return [operator.gradient_dtype] if operator.gradient_dtype is not None else []
    if law.in_mode is not None and not operator.leading:
        return []
    if settings.dtypes == "preferred" or (settings.dtypes == "all" and law.in_mode is not None):
        return [operator.preferred_dtype] if operator.dtypes else []
    if settings.dtypes == "all":
        return sorted(operator.dtypes, key=str)
    wanted = [getattr(torch, name) for name in settings.dtypes.split(",")]
    return [dtype for dtype in wanted if dtype in operator.dtypes]


# For calls without a valid result under P7's kinds: operators on whole matrices, if each matrix has a hole under them.
LAST_RESORTS = (ONE_HOLE, "stored")

# The trials of one run on storages other than dense, by sample and kind of mask.
Made = dict[tuple[Sample, str], Trial]


def trials_of(
    operator: Operator,
    name: str,
    subject: Subject,
    settings: Settings,
    stored: bool = False,
    whole: bool = False,
    made: Made | None = None,
) -> Iterator[tuple[str, Trial]]:
    """Every trial of a law, with its description.

    stored  whether on storages other than dense
    whole   whether under the masks for operators that refuse partly valid input
    made    the trials so far on storages other than dense: the same ones are yielded again, with what they remember
    """
    law = LAWS[name]
    masks = law.whole if whole else law.masks_stored if stored else law.masks
    kinds_wanted = [kind for kind in settings.masks if kind in masks]
    sparingly = ONE_HOLE in kinds_wanted and len(settings.masks) > 1
    once = asked_once(stored) if len(settings.masks) > 1 else ()
    for dtype in dtypes_of(operator, name, settings):
        candidates = _stored_samples(operator, dtype) if stored else _samples(operator, dtype)
        samples = _compiled_samples(operator, dtype, settings) if law.in_mode is not None else candidates
        if settings.sample is not None:
            samples = [s for s in samples if s.number == settings.sample]
        elif law.in_mode is None:
            samples = chosen(chosen(samples, settings.most), settings.most_stored if stored else None)
        asked: set[str] = set()
        for sample in samples:
            kinds = [kind for kind in kinds_wanted if not (sparingly and kind == ONE_HOLE)]
            if law.in_mode is not None:
                others = LAST_RESORTS if not whole and len(settings.masks) > 1 else ()
                kinds = _first_with_valid_results(subject, sample, kinds, others, settings.seed)
            for kind in kinds:
                call = call_under(kind, sample, isinstance(operator, DatabaseOperator))
                masks_of_call = None if call is None or kind in asked else masking(kind, call.tensors, settings.seed)
                if call is not None and masks_of_call is not None:
                    asked.update({kind}.intersection(once))
                    trial = Trial(subject, call, masks_of_call, settings.seed)
                    if stored and made is not None:
                        trial = made.setdefault((sample, kind), trial)
                    yield describe(sample, kind), trial
        if sparingly:
            yield from _with_one_hole(candidates, samples, law, subject, settings)


def _with_one_hole(
    candidates: list[Sample], samples: list[Sample], law: Law, subject: Subject, settings: Settings
) -> Iterator[tuple[str, Trial]]:
    """One trial with one hole in each tensor, of the first sample that has a valid result under such masks.

    P2 makes this trial for every operator. The other laws make it if the other masks leave nothing valid in the results
    of `samples`: for operators on whole slices, if every slice has a hole under these masks.
    """
    if not law.one_hole and any(_has_valid_results(subject, s, "half", settings.seed) for s in samples):
        return
    for sample in candidates[:MOST_TRIED]:
        if _has_valid_results(subject, sample, ONE_HOLE, settings.seed):
            masks = masking(ONE_HOLE, sample.tensors, settings.seed)
            assert masks is not None
            yield describe(sample, ONE_HOLE), Trial(subject, sample, masks, settings.seed)
            return


def _first_with_valid_results(
    subject: Subject, sample: Sample, kinds: list[str], others: Sequence[str], seed: int
) -> list[str]:
    """The first kind of mask under which a call succeeds with a valid element in its results; else the first kind.

    Compiling is slow, so only one mask is used. Under some masks there is nothing to compare: a call may require valid
    lengths, and windows that need every element may all be invalid. The `others` are tried after calls that have no
    valid result.
    """
    found = [_has_valid_results(subject, sample, kind, seed) for kind in kinds]
    if True in found:
        return [kinds[found.index(True)]]
    if False not in found:
        return kinds[:1]
    return [kind for kind in others if _has_valid_results(subject, sample, kind, seed)][:1] or kinds[:1]


def _has_valid_results(subject: Subject, sample: Sample, kind: str, seed: int) -> bool | None:
    """Whether a call under a kind of mask has a valid element in its results; None if it fails or there is no call."""
    masks = masking(kind, sample.tensors, seed)
    if masks is None:
        return None
    trial = Trial(subject, sample, masks, seed)
    try:
        args, kwargs, _ = trial.wrapped()
        results = observed(subject, trial.run(args, kwargs))
    except Exception:
        return None
    return any(not isinstance(value, tuple) or value[1] is None or bool(value[1].any()) for value in results)


def _compiled_samples(operator: Operator, dtype: torch.dtype, settings: Settings) -> list[Sample]:
    """One call of each overload that an entry calls; for another library's operator, a few of its larger samples."""
    if settings.whole_entries and isinstance(operator, DatabaseOperator):
        return entry_samples(operator, dtype)[: None if settings.sample is not None else 1]
    if isinstance(operator, RegisteredOperator):
        large = [s for s in _samples(operator, dtype) if all(t.numel() > 1 for t in s.tensors)]
        return chosen(large or _samples(operator, dtype), None if settings.sample is not None else MOST_COMPILED)
    left_out = left_to_others(operator, settings.each_overload_once, 1)
    return [s for s in overload_samples(operator, dtype, left_out) if s.tensors]


def _samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    """The operator's part of the samples. Trials work on copies of their tensors."""
    return _all_samples(operator, dtype)[operator.part]


@functools.lru_cache(maxsize=16)  # every law iterates over the same samples, in every dtype
def _all_samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    """The samples with tensors to mask, without giants if there are others."""
    samples = [s for s in operator.samples(dtype) if s.tensors]
    return [s for s in samples if sum(t.numel() for t in s.tensors) <= MOST_ELEMENTS] or samples


@functools.lru_cache(maxsize=4)
def _stored_samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    """The samples for storages other than dense, all of them in the first part."""
    return storable(_all_samples(operator, dtype)) if operator.part.start == 0 else []


def run_operator(name: str | Operator, settings: Settings, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run every case of an operator. Before each, `say` gets its repro line, so that a crash can be traced."""
    operator = operator_named(name) if isinstance(name, str) else name
    subject = settings.find_subject()
    report = Report(name if isinstance(name, str) else operator.name)
    started = time.monotonic()
    gaps = GapTracker(gaps_of(operator))
    made: Made = {}
    with warnings.catch_warnings(), zeros_verified():
        warnings.simplefilter("ignore")
        for law in map(LAWS.__getitem__, settings.laws):
            report.counts.setdefault(law.name, Counter())
            supported = law.of_plain or law.of_devices or subject.laws is None or law.name in subject.laws
            if not supported:
                report.silences[law.name] = {f"the subject {subject.name!r} does not support it": 1}
            for case in _cases(law, operator, subject, settings, made, report) if supported else ():
                line = repro(operator, law.name, case, settings)
                say(line)
                status, message = gaps.judged(law.name, case.description, *case.outcome())
                report.record(law, case, status, message, line)
                if settings.until_broken and status in ("broken", "error"):
                    break
            if settings.until_broken and report.failures:
                break
        for unasked in (law for law in settings.laws if not report.asked(law)):
            why = exemption(operator, unasked, settings.seed, report.silences.get(unasked, {}))
            if why is not None:
                report.exemptions[unasked] = why
    for gap in () if operator.divided else gaps.closed():
        report.outcomes.append(
            Outcome(gap.law, gap.where, "broken", f"a named gap no longer fails: {gap}; remove it", "")
        )
        report.counts.setdefault(gap.law, Counter())["broken"] += 1
    report.seconds = time.monotonic() - started
    for table in report.tables:
        table.update({key: dict(counts) for key, counts in table.items()})
    return report


def _cases(
    law: Law, operator: Operator, subject: Subject, settings: Settings, made: Made, report: Report
) -> Iterator[Case]:
    """Every case of a law; other masks, and other calls in graphs, only if no case tested it (by `report`)."""
    if law.cases is not None:
        yield from law.cases(operator, subject, settings)
    else:
        yield from _trials(law, operator, subject, settings, made)
        if law.whole and not report.asked(law.name):
            yield from _trials(law, operator, subject, settings, made, whole=True)
        if law.in_mode is not None and settings.whole_entries and not report.asked(law.name):
            yield from _trials(law, operator, subject, replace(settings, whole_entries=False), made)
    if law.also is not None:
        yield from law.also(operator, subject, settings)


def _trials(
    law: Law, operator: Operator, subject: Subject, settings: Settings, made: Made, whole: bool = False
) -> Iterator[Case]:
    """The trials of a law as cases: on dense storage, on each of the others, or in each mode."""
    checks: list[tuple[Option | None, Check]] = []
    if law.check is not None and (settings.dense or law.stored is None):
        checks.append((None, law.check))
    if law.stored is not None:
        # (A law about storages alone is tested on all of them.)
        names = settings.storages if law.check is None else settings.also_stored
        can_store = [s for s in names if subject.can_store(storage_of(s)[0])]
        checks += [(("--storage", s), _named(law.stored, s)) for s in can_store]
    if law.in_mode is not None:
        checks += [(("--mode", m), _named(law.in_mode, m)) for m in settings.modes]
    for option, check in checks:
        stored = option is not None and option[0] == "--storage"
        for description, trial in trials_of(operator, law.name, subject, settings, stored, whole, made):
            dtype, _, number, kind = description.split()[:4]
            yield Case(
                f"{description} {option[1]}" if option else description,
                functools.partial(check, trial),
                option,
                f" --sample {number} --mask {kind} --dtype {dtype} --seed {settings.seed}",
                trial,
            )


def _named(check: CheckIn, name: str) -> Check:
    """A check in one storage or mode."""
    return lambda trial: check(trial, name)


def exemption(operator: Operator, name: str, seed: int = 0, silences: Mapping[str, int] | None = None) -> str | None:
    """Why a law does not apply to an operator, by its schema, its rule's category or its derivative; None if it does.

    The rule's results have no influence: a law that applies but that no trial could test is undecided (verdict.py).

    silences  why trials of the law had nothing to ask, with their number; None before there are any
    """
    law = LAWS[name]
    if not operator.dtypes:
        return NOT_ON_THIS_MACHINE
    rule = operator.rule if isinstance(operator, RegisteredOperator) else None
    if rule is not None and rule.category is REFUSED and name not in ("P2", "P8"):
        return "its rule refuses every masked input"
    if law.in_mode is not None and not operator.leading:
        return "it is tested once, in the operator's preferred dtype"
    return None if law.exempt is None else law.exempt(operator, seed, silences)


def describe(sample: Sample, kind: str) -> str:
    """A short description of a trial; gaps select trials by its words."""
    overload = f" {sample.fn}" if isinstance(sample.fn, OpOverload) else ""
    return f"{str(sample.dtype).removeprefix('torch.')} sample {sample.number} {kind}{overload}"


def repro(operator: Operator, law: str, case: Case, settings: Settings) -> str:
    """The command line that runs one case."""
    name = settings.subject or os.environ.get("OP_REGISTRY_SUBJECT")
    option = f" {case.option[0]} {case.option[1]}" if case.option else ""
    return (
        f"python -m op_registry check{_imports(operator, settings)} --op {operator.name} --law {law}{case.repeat}"
        f"{option}{f' --subject {name}' if name else ''}{f' --device {settings.device}' if settings.device else ''}"
        f"{_remark(operator)}"
    )


def _imports(operator: Operator, settings: Settings) -> str:
    """The --import options that register the operator's rule."""
    module = operator.module if isinstance(operator, RegisteredOperator) else None
    needed = [module] if module is not None and module.partition(".")[0] != "op_registry" else []
    return "".join(f" --import {module}" for module in dict.fromkeys([*settings.modules, *needed]))


def _remark(operator: Operator) -> str:
    """A shell comment that says why the command line does not work as it is; "" if it does."""
    if not isinstance(operator, RegisteredOperator) or operator.module is not None:
        return ""
    where = operator.rule.where if operator.rule is not None else "an overlay"
    return f"  # the rule is registered in __main__ ({where}): move it to a module, and add --import MODULE"


# --------------------------------------------------------------------------------- a check, and a run of many operators

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
    lost = "its process ended, and no report came back"  # (hours of other reports are not lost with it)
    return [reports.get(name) or _failed(name, lost, "") for name in operators]


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
