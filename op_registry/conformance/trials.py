"""The trials of one operator and their outcomes: what a worker process of the runner executes."""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from op_registry.conformance import closed, gradients, laws, masked_later, modes, stated_dims, storages
from op_registry.conformance.applicability import exemption
from op_registry.conformance.devices.available import device_called
from op_registry.conformance.devices.on_device import OnDevice
from op_registry.conformance.gap_tracker import GapTracker
from op_registry.conformance.gaps import gaps_of
from op_registry.conformance.masks import DESCRIPTIONS, KINDS, ONE_HOLE, PARTIAL, WHOLE, Masking, masking
from op_registry.conformance.oracles.call import Misdeclared, OracleFailed
from op_registry.conformance.own_operators import RegisteredOperator
from op_registry.conformance.padded_trials import padded_trials
from op_registry.conformance.report import Outcome, Report, Status
from op_registry.conformance.repro_lines import Option, describe, imports, remark, repro
from op_registry.conformance.sample import Operator, Sample
from op_registry.conformance.samples import (
    DatabaseOperator,
    chosen,
    entries_by_overload,
    entry_samples,
    operator_named,
    overload_samples,
)
from op_registry.conformance.shared_operands import asked_once, call_under
from op_registry.conformance.stored_samples import storable
from op_registry.conformance.subject import Subject
from op_registry.conformance.subjects import find_subject
from op_registry.conformance.trial import (
    Broken,
    Densified,
    Law,
    NotAsked,
    Refusal,
    RefusedRightly,
    Trial,
    observed,
    refused_by_the_semantics,
    storage_of,
)
from op_registry.errors import MaskedSemanticsError
from op_registry.records.zeros import zeros_verified
from op_registry.rule import IN_A_RULE

LAWS: dict[str, Law] = {
    "P1": laws.all_valid_identity,
    "P2": laws.compress,
    "P3": laws.non_interference,
    "P5": gradients.gradients_are_derivatives,
    "P6": modes.views_alias,
    "P8": closed.closed_or_refused,
    "later": masked_later.nothing_comes_back,
}
# The laws that we test on storages other than dense.
STORED: dict[str, Callable[..., None]] = {
    "P3": storages.non_interference,
    "P4": storages.layouts_agree,
    "P5": storages.gradients_agree,
    "later": masked_later.nothing_comes_back,
}
MODES = ("aot_eager", "aot_eager_dynamic", "inductor", "inductor_dynamic")
ALL_LAWS = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "dims", "later")
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
    # The device that the subject computes on (devices/available.py); None is the CPU.
    device: str | None = None

    def find_subject(self) -> Subject:
        """The subject, on its device."""
        subject = find_subject(self.subject)
        return subject if self.device is None else OnDevice(subject, device_called(self.device))


def dtypes_of(operator: Operator, law: str, settings: Settings) -> list[torch.dtype]:
    """The dtypes in which a law is tested."""
    if law in ("P5", "later"):
        return [operator.gradient_dtype] if operator.gradient_dtype is not None else []
    if law == "P7" and not operator.leading:
        return []
    if settings.dtypes == "preferred" or (settings.dtypes == "all" and law == "P7"):
        return [operator.preferred_dtype] if operator.dtypes else []
    if settings.dtypes == "all":
        return sorted(operator.dtypes, key=str)
    wanted = [getattr(torch, name) for name in settings.dtypes.split(",")]
    return [dtype for dtype in wanted if dtype in operator.dtypes]


def kinds_of(law: str, settings: Settings, stored: bool = False, whole: bool = False) -> list[str]:
    """The masks under which a law is tested.

    stored  whether on storages other than dense
    whole   whether to use the masks of WANTED_WHOLE
    """
    key = "P4" if stored and law != "later" else law
    wanted = (WANTED_WHOLE if whole else WANTED).get(key, tuple(DESCRIPTIONS))
    return [kind for kind in settings.masks if kind in wanted]


# The kinds of masks that test a law; all kinds for laws not listed.
WANTED: dict[str, tuple[str, ...]] = {
    "P1": WHOLE,
    "P2": ("stored", *PARTIAL),  # P1 covers "unstored"
    "P3": PARTIAL,
    "P4": ("half", "half_first", "half_others", "half_values", "slices", "empty", "shared", "itself", ONE_HOLE),
    "P6": ("unstored", "half", "empty", "broadcast"),
    "P7": ("half", "half_first", "slices"),
    "P8": ("half", "half_first", "half_others", "slices", "empty"),
    "later": masked_later.KINDS,
}
# For calls without a valid result under P7's kinds: operators on whole matrices, if each matrix has a hole under them.
LAST_RESORTS = (ONE_HOLE, "stored")
# The kinds for an operator that refuses partly valid input.
WANTED_WHOLE: dict[str, tuple[str, ...]] = {"P4": WHOLE, "P7": ("unstored",)}


# The trials of one run on storages other than dense, by sample and kind of mask.
Made = dict[tuple[Sample, str], Trial]


def trials_of(
    operator: Operator,
    law: str,
    subject: Subject,
    settings: Settings,
    stored: bool = False,
    whole: bool = False,
    made: Made | None = None,
) -> Iterator[tuple[str, Trial]]:
    """Every trial of a law, with its description; see :func:`kinds_of` for `stored` and `whole`.

    made  the trials so far on storages other than dense: the same ones are yielded again, with what they remember
    """
    for dtype in dtypes_of(operator, law, settings):
        if law == "P7":
            samples = _compiled_samples(operator, dtype, settings)
        else:
            samples = _stored_samples(operator, dtype) if stored else _samples(operator, dtype)
        if settings.sample is not None:
            samples = [s for s in samples if s.number == settings.sample]
        elif law != "P7":
            samples = chosen(chosen(samples, settings.most), settings.most_stored if stored else None)
        kinds_wanted = kinds_of(law, settings, stored, whole)
        sparingly = ONE_HOLE in kinds_wanted and len(settings.masks) > 1
        once = asked_once(stored) if len(settings.masks) > 1 else ()
        asked: set[str] = set()
        for sample in samples:
            kinds = [kind for kind in kinds_wanted if not (sparingly and kind == ONE_HOLE)]
            if law == "P7":
                others = LAST_RESORTS if not whole and len(settings.masks) > 1 else ()
                kinds = _first_with_valid_results(subject, sample, kinds, others, settings.seed)
            for kind in kinds:
                call = call_under(kind, sample, isinstance(operator, DatabaseOperator))
                masks = None if call is None or kind in asked else masking(kind, call.tensors, settings.seed)
                if call is not None and masks is not None:
                    asked.update({kind}.intersection(once))
                    trial = Trial(subject, call, masks, settings.seed)
                    if stored and made is not None:
                        trial = made.setdefault((sample, kind), trial)
                    yield describe(sample, kind), trial
        if sparingly:
            candidates = _stored_samples(operator, dtype) if stored else _samples(operator, dtype)
            yield from _with_one_hole(candidates, samples, law, subject, settings)


def _with_one_hole(
    candidates: list[Sample], samples: list[Sample], law: str, subject: Subject, settings: Settings
) -> Iterator[tuple[str, Trial]]:
    """One trial with one hole in each tensor, of the first sample that has a valid result under such masks.

    P2 makes this trial for every operator. The other laws make it if the other masks leave nothing valid in the results
    of `samples`: for operators on whole slices, if every slice has a hole under these masks.
    """
    if law != "P2" and any(_has_valid_results(subject, s, "half", settings.seed) for s in samples):
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
    return [s for s in overload_samples(operator, dtype, _left_to_another_entry(operator, settings)) if s.tensors]


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


def _left_to_another_entry(operator: Operator, settings: Settings, few: int = 1) -> Callable[[OpOverload], bool]:
    """A predicate: whether the first `few` entries that call an overload ask it (`each_overload_once`)."""
    if not settings.each_overload_once:
        return lambda op: False
    owners = entries_by_overload()
    return lambda op: operator.name not in owners.get(op, (operator.name,))[:few]


def run_operator(name: str | Operator, settings: Settings, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run every trial of an operator. Before each, `say` gets its repro line, so that a crash can be traced."""
    operator = operator_named(name) if isinstance(name, str) else name
    subject = settings.find_subject()
    report = Report(name if isinstance(name, str) else operator.name)
    started = time.monotonic()
    gaps = GapTracker(gaps_of(operator))
    made: Made = {}
    with warnings.catch_warnings(), zeros_verified():
        warnings.simplefilter("ignore")
        for law in settings.laws:
            report.counts.setdefault(law, Counter())
            if law == "dims":
                _dimensions(operator, settings, gaps, report, say)
            elif law == "P9" and law in subject.laws:
                _padded(operator, subject, settings, gaps, report, say)
            elif law in subject.laws:
                _try_law(law, operator, subject, settings, gaps, report, say, made)
                if law in WANTED_WHOLE and not report.asked(law):
                    _try_law(law, operator, subject, settings, gaps, report, say, made, whole=True)
                if law == "P7" and settings.whole_entries and not report.asked(law):
                    in_parts = dataclasses.replace(settings, whole_entries=False)
                    _try_law(law, operator, subject, in_parts, gaps, report, say, made)
            else:
                report.silences[law] = {f"the subject {subject.name!r} does not support it": 1}
            if settings.until_broken and report.failures:
                break
        stopped = settings.until_broken and report.failures
        if "P1" in settings.laws and settings.sample is None and subject.own_errors and not stopped:
            _errors(operator, subject, gaps, report, say)
        for law in settings.laws:
            why = None if report.asked(law) else exemption(operator, law, settings.seed, report.silences.get(law, {}))
            if why is not None:
                report.exemptions[law] = why
    for gap in () if operator.divided else gaps.closed():
        report.outcomes.append(
            Outcome(gap.law, gap.where, "broken", f"a named gap no longer fails: {gap}; remove it", "")
        )
        report.counts.setdefault(gap.law, Counter())["broken"] += 1
    report.seconds = time.monotonic() - started
    by_law = (report.counts, report.silences, report.dtypes, report.storages)
    for table in (*by_law, report.rules, report.refusals, report.unasked):
        table.update({key: dict(counts) for key, counts in table.items()})
    return report


def _try_law(
    law: str,
    operator: Operator,
    subject: Subject,
    settings: Settings,
    gaps: GapTracker,
    report: Report,
    say: Callable[[str], None],
    made: Made,
    whole: bool = False,
) -> None:
    """Run every trial of one law."""
    for option, check in _checks(law, subject, settings):
        stored = option is not None and law in STORED
        for description, trial in trials_of(operator, law, subject, settings, stored, whole, made):
            line = repro(operator, law, description, settings, option)
            say(line)
            full_description = f"{description} {option[1]}" if option else description
            control = functools.partial(modes.torch_fails_too, trial, option[1]) if option and law == "P7" else None
            status, message = gaps.judged(law, full_description, *outcome_of(check, trial), control)
            _record(report, law, full_description, status, message, line)
            if option and law == "P4":
                report.storages.setdefault(option[1], Counter())[status] += 1
            if settings.until_broken and status in ("broken", "error"):
                return


def _checks(law: str, subject: Subject, settings: Settings) -> list[tuple[Option | None, Law]]:
    """The checks of a law: P4 one for each storage, P3, P5 and "later" for dense and some others, P7 for each mode."""
    if law == "P7":
        return [(("--mode", m), functools.partial(modes.modes_agree, mode=m)) for m in settings.modes]
    on_dense = law in LAWS and (settings.dense or law not in STORED)
    checks: list[tuple[Option | None, Law]] = [(None, LAWS[law])] if on_dense else []
    if law in STORED:
        wanted = settings.storages if law == "P4" else settings.also_stored
        supported = [s for s in wanted if subject.can_store(storage_of(s)[0])]
        checks += [(("--storage", s), functools.partial(STORED[law], storage=s)) for s in supported]
    return checks


def _errors(operator: Operator, subject: Subject, gaps: GapTracker, report: Report, say: Callable[[str], None]) -> None:
    """Run P1 for the calls on which torch raises."""
    if not isinstance(operator, DatabaseOperator) or not operator.leading:
        return
    for sample in operator.error_samples():
        if not sample.tensors:
            continue
        description = f"{str(sample.dtype).removeprefix('torch.')} error {sample.number} unstored"
        line = f"python -m op_registry check --op {operator.name} --law P1"
        say(line)
        outcome = outcome_of(laws.same_errors, Trial(subject, sample, _without_masks(sample)))
        status, message = gaps.judged("P1", description, *outcome)
        _record(report, "P1", description, status, message, line)


def _dimensions(
    operator: Operator, settings: Settings, gaps: GapTracker, report: Report, say: Callable[[str], None]
) -> None:
    """Compare what rules state of their dimensions with plain torch."""
    line = f"python -m op_registry check{imports(operator, settings)} --op {operator.name} --law dims"
    say(line)
    for op, status, message in stated_dims.outcomes(operator, settings.seed):
        description = f"{str(operator.preferred_dtype).removeprefix('torch.')} samples all unstored {op}"
        status, message = gaps.judged("dims", description, status, message)
        _record(report, "dims", description, status, message, line + remark(operator))


def _padded(
    operator: Operator,
    subject: Subject,
    settings: Settings,
    gaps: GapTracker,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Run P9 for each rule that the operator's samples call: densely, and as the subject can, stored and in modes."""
    everywhere = settings.most is None and settings.dense
    stored = subject.padded_storages if everywhere else settings.also_stored
    dense: list[Option | None] = [None] if settings.dense else []
    ways = [*dense, *(("--storage", s) for s in stored if s in subject.padded_storages)]
    in_graphs = settings.modes if everywhere or not settings.dense else ()
    modes: list[Option | None] = [("--mode", m) for m in in_graphs if m in subject.padded_modes]
    left_out = _left_to_another_entry(operator, settings, few=3)
    compiled: set[OpOverload] = set()
    for trial in padded_trials(operator, settings.seed, settings.most, settings.sample, left_out):
        # One ragged batch of each rule is asked in other modes.
        in_modes = modes if trial.ragged is not None and trial.op not in compiled and trial.form is None else []
        compiled |= {trial.op} if in_modes else set()
        # (What a form writes is its rule's result: densely is enough.)
        for option in [*(ways if trial.form is None else dense), *in_modes]:
            description = f"{trial} {option[1]}" if option else str(trial)
            line = repro(operator, "P9", description, settings, option)
            say(line)
            outcome = status_of(functools.partial(trial.run, subject, settings.seed, option))
            status, message = gaps.judged("P9", description, *outcome)
            _record(report, "P9", description, status, message, line)
            report.add_of_rule(str(trial.asked), status, message)
            if settings.until_broken and status in ("broken", "error"):
                return


def _without_masks(sample: Sample) -> Masking:
    masks = masking("unstored", sample.tensors)
    assert masks is not None
    return masks


def _record(report: Report, law: str, description: str, status: Status, message: str, line: str) -> None:
    report.counts.setdefault(law, Counter())[status] += 1
    report.dtypes.setdefault(description.partition(" ")[0], Counter())[status] += 1
    if status == "densified" or (status == "not asked" and message.startswith("no oracle")):
        report.reasons[message] = report.reasons.get(message, 0) + 1
    elif status not in ("pass", "refused rightly", "not asked"):
        report.outcomes.append(Outcome(law, description, status, message, line))
    if status == "not asked":
        report.silences.setdefault(law, Counter())[message] += 1


def outcome_of(check: Law, trial: Trial) -> tuple[Status, str]:
    """The status of one trial, and its message."""
    if trial.plain_error is not None and check is not laws.same_errors:
        return "not asked", f"plain torch raises {trial.plain_error}"
    outcome = status_of(functools.partial(check, trial), functools.partial(refused_by_the_semantics, trial))
    why = trial.subject.excuse(trial.sample) if outcome[0] in ("broken", "error") else None
    return outcome if why is None else ("not asked", why)


def status_of(run: Callable[[], None], has_no_result: Callable[[], bool] = lambda: False) -> tuple[Status, str]:
    """The status of a trial that `run` makes, and its message; `has_no_result` says whether the semantics refuse it."""
    try:
        run()
    except NotAsked as reason:
        return "not asked", str(reason)
    except Densified as reason:
        return "densified", str(reason)
    except RefusedRightly as reason:
        return "refused rightly", str(reason)
    except (Broken, Misdeclared) as reason:
        return "broken", str(reason)
    except OracleFailed as reason:
        return "error", f"not the rule, but {reason}"
    except (Refusal, MaskedSemanticsError) as reason:
        if has_no_result():
            return "not asked", f"refused, as the semantics require: {_first_line(reason)}"
        return "refused", _first_line(reason)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
        rule = str(error).partition(IN_A_RULE)[2]
        named = f"{IN_A_RULE.strip()} {rule}: " if rule else ""
        return "error", f"{named}{type(error).__name__}: {_first_line(error)}{where}"
    return "pass", ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
