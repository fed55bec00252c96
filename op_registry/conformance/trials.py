"""Which trials there are for an operator, and what came of each: the part of the runner that runs in a worker."""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.conformance import gradients, laws, modes, storages
from op_registry.conformance.gaps import covers, gaps_of
from op_registry.conformance.laws import Broken, Densified, NotAsked, Refusal, Trial
from op_registry.conformance.masks import KINDS, PARTIAL, WHOLE, masking
from op_registry.conformance.oracles import Refused
from op_registry.conformance.samples import (
    DatabaseOperator,
    Operator,
    Sample,
    chosen,
    entries_by_overload,
    operator_named,
    overload_samples,
)
from op_registry.conformance.stored_samples import storable
from op_registry.conformance.subject import Subject, find_subject
from op_registry.errors import MaskedSemanticsError
from op_registry.rule import Gap

LAWS: dict[str, laws.Law] = {
    "P1": laws.all_valid_identity,
    "P2": laws.compress,
    "P3": laws.non_interference,
    "P5": gradients.gradients_are_derivatives,
    "P6": modes.views_alias,
}
# The laws that are tried on storages other than dense.
STORED: dict[str, Callable[..., None]] = {
    "P3": storages.non_interference,
    "P4": storages.layouts_agree,
    "P5": storages.gradients_agree,
}
MODES = ("aot_eager", "inductor")
ALL_LAWS = (*LAWS, "P4", "P7")
# What P4 compares with dense storage: every masked tensor stored so, and only the first of several.
STORAGES = ("coo", "csr", "csc", "bsr", "bsc", "hybrid", "packed", "csr_first")

# The outcomes of a trial, best first. A refusal is no broken law, but no answer either.
STATUSES = ("pass", "densified", "not asked", "refused", "gap", "broken", "error")


@dataclass(frozen=True)
class Settings:
    """What is run for each operator. Everything that a result depends on, so that a run can be taken up again."""

    subject: str | None = None
    laws: tuple[str, ...] = ("P1", "P2", "P3", "P4", "P5", "P6", "P7")
    # Samples for each operator and dtype, of as many shapes of call as there are; None is all of them.
    most: int | None = 4
    # The same on storages other than dense, none more than that.
    most_stored: int | None = 4
    masks: tuple[str, ...] = KINDS
    # Names of dtypes, "preferred" for float32 where there is one, "all" for whatever the operator takes (P7, which is
    # about graphs, stays with the preferred one).
    dtypes: str = "preferred"
    modes: tuple[str, ...] = ("aot_eager",)
    storages: tuple[str, ...] = STORAGES
    # Those in which P3 and P5 are tried too, beside dense storage.
    also_stored: tuple[str, ...] = ()
    seed: int = 0
    # One sample only, by its number in the database.
    sample: int | None = None
    # P7 for an overload in the first entry that calls it, and in no other.
    each_overload_once: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of one trial that did not pass."""

    law: str
    description: str
    status: str
    message: str
    repro: str


@dataclass
class Report:
    """Everything about one operator: how many trials of each law came out how, and those that did not pass."""

    operator: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    # How many trials in each dtype came out how.
    dtypes: dict[str, dict[str, int]] = field(default_factory=dict)
    # How many trials of P4 in each storage came out how.
    storages: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Outcome]:
        """Broken laws and unexpected errors, outside of named gaps."""
        return [o for o in self.outcomes if o.status in ("broken", "error")]

    def count(self, status: str) -> int:
        """How many trials of all laws came out so."""
        return sum(c.get(status, 0) for c in self.counts.values())

    def add(self, other: Report) -> None:
        """Take in what came of other trials of the same operator."""
        both = ((self.counts, other.counts), (self.dtypes, other.dtypes), (self.storages, other.storages))
        for mine, theirs in both:
            for key, counts in theirs.items():
                mine[key] = dict(Counter(mine.get(key, {})) + Counter(counts))
        self.outcomes += other.outcomes
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.seconds += other.seconds

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> Report:
        """From the results file."""
        outcomes = [Outcome(**o) for o in kept.pop("outcomes")]
        return cls(**kept, outcomes=outcomes)


def dtypes_of(operator: Operator, law: str, settings: Settings) -> list[torch.dtype]:
    """The dtypes in which a law is tried."""
    if law == "P5":
        return [operator.gradient_dtype] if operator.gradient_dtype is not None else []
    if law == "P7" and not operator.leading:
        return []
    if settings.dtypes == "preferred" or (settings.dtypes == "all" and law == "P7"):
        return [operator.preferred_dtype] if operator.dtypes else []
    if settings.dtypes == "all":
        return sorted(operator.dtypes, key=str)
    wanted = [getattr(torch, name) for name in settings.dtypes.split(",")]
    return [dtype for dtype in wanted if dtype in operator.dtypes]


def kinds_of(law: str, settings: Settings, stored: bool = False) -> list[str]:
    """The masks under which a law is tried, on dense storage or `stored` otherwise."""
    wanted = {
        "P1": WHOLE,
        "P3": PARTIAL,
        "P4": ("half", "slices", "empty"),
        "P6": ("unstored", "half", "empty", "broadcast"),
        "P7": ("half",),
    }.get("P4" if stored else law, KINDS)
    return [kind for kind in settings.masks if kind in wanted]


def trials_of(
    operator: Operator, law: str, subject: Subject, settings: Settings, stored: bool = False
) -> Iterator[tuple[str, Trial]]:
    """Every trial of a law, with its description; `stored` on other storage than dense, under fewer masks."""
    for dtype in dtypes_of(operator, law, settings):
        if law == "P7":
            samples = [
                s for s in overload_samples(operator, dtype, _another_entry_asks(operator, settings)) if s.tensors
            ]
        else:
            samples = _stored_samples(operator, dtype) if stored else _samples(operator, dtype)
        if settings.sample is not None:
            samples = [s for s in samples if s.number == settings.sample]
        elif law != "P7":
            samples = chosen(chosen(samples, settings.most), settings.most_stored if stored else None)
        for sample in samples:
            for kind in kinds_of(law, settings, stored):
                masks = masking(kind, sample.tensors, settings.seed)
                if masks is not None:
                    yield describe(sample, kind), Trial(subject, sample, masks, settings.seed)


@functools.lru_cache(maxsize=16)  # the laws ask one after another, each in every dtype
def _samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    """The samples that have something to mask. Trials work on copies of their tensors."""
    return [s for s in operator.samples(dtype) if s.tensors]


@functools.lru_cache(maxsize=4)
def _stored_samples(operator: Operator, dtype: torch.dtype) -> list[Sample]:
    """Those of them that tell storages apart."""
    return storable(_samples(operator, dtype))


def _another_entry_asks(operator: Operator, settings: Settings) -> Callable[[OpOverload], bool]:
    """Whether an overload is left to the first entry that calls it, in a run over all of them."""
    if not settings.each_overload_once:
        return lambda op: False
    owners = entries_by_overload()
    return lambda op: owners.get(op, (operator.name,))[0] != operator.name


def describe(sample: Sample, kind: str) -> str:
    """A trial in a few words, which gaps may quote."""
    overload = f" {sample.fn}" if isinstance(sample.fn, OpOverload) else ""
    return f"{str(sample.dtype).removeprefix('torch.')} sample {sample.number} {kind}{overload}"


def repro(operator: Operator, law: str, description: str, settings: Settings, option: Option | None = None) -> str:
    """The command line that runs one trial."""
    dtype, _, number, kind = description.split()[:4]
    subject = f" --subject {settings.subject}" if settings.subject else ""
    chosen = f" {option[0]} {option[1]}" if option else ""
    return (
        f"python -m op_registry check --op {operator.name} --law {law} --sample {number} --mask {kind} "
        f"--dtype {dtype} --seed {settings.seed}{chosen}{subject}"
    )


def run_operator(name: str | Operator, settings: Settings, say: Callable[[str], None] = lambda text: None) -> Report:
    """Every trial of an operator. `say` is told what is about to run, so that a crash has a name."""
    operator = operator_named(name) if isinstance(name, str) else name
    subject = find_subject(settings.subject)
    report = Report(name if isinstance(name, str) else operator.name)
    started = time.monotonic()
    named = _NamedGaps(gaps_of(operator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for law in settings.laws:
            if law not in subject.laws:
                continue
            for option, check in _checks(law, subject, settings):
                stored = option is not None and law in STORED
                for description, trial in trials_of(operator, law, subject, settings, stored):
                    line = repro(operator, law, description, settings, option)
                    say(line)
                    described = f"{description} {option[1]}" if option and stored else description
                    status, message = named.judged(law, described, *outcome_of(check, trial))
                    _keep(report, law, described, status, message, line)
                    if option and law == "P4":
                        report.storages.setdefault(option[1], Counter())[status] += 1
        if "P1" in settings.laws and settings.sample is None and subject.own_errors:
            _errors(operator, subject, named, report, say)
    for gap in named.closed():
        report.outcomes.append(
            Outcome(gap.law, gap.where, "broken", f"a named gap no longer fails: {gap}; take it out", "")
        )
        report.counts.setdefault(gap.law, Counter())["broken"] += 1
    report.seconds = time.monotonic() - started
    report.counts = {law: dict(counts) for law, counts in report.counts.items()}
    report.dtypes = {dtype: dict(counts) for dtype, counts in report.dtypes.items()}
    report.storages = {storage: dict(counts) for storage, counts in report.storages.items()}
    return report


class _NamedGaps:
    """The gaps of an operator, and which of them the trials have found to be there."""

    def __init__(self, gaps: Sequence[Gap]) -> None:
        self.gaps = gaps
        self.asked: set[int] = set()
        self.failed: set[int] = set()

    def judged(self, law: str, description: str, status: str, message: str) -> tuple[str, str]:
        """A trial's outcome, in the light of what is named."""
        spoken = [n for n, gap in enumerate(self.gaps) if covers(gap, law, description)]
        if status != "not asked":
            self.asked.update(spoken)
        if spoken and status in ("broken", "error", "refused"):
            self.failed.update(spoken)
            return "gap", f"{self.gaps[spoken[0]].why} ({message})"
        return status, message

    def closed(self) -> list[Gap]:
        """Gaps that no longer fail."""
        return [self.gaps[n] for n in sorted(self.asked - self.failed)]


# A law's option on the command line, by name and value.
Option = tuple[str, str]


def _checks(law: str, subject: Subject, settings: Settings) -> list[tuple[Option | None, laws.Law]]:
    """A law as checks: P4 for each storage, P3 and P5 for dense storage and some others, P7 for each mode."""
    if law == "P7":
        return [(("--mode", m), functools.partial(modes.modes_agree, mode=m)) for m in settings.modes]
    checks: list[tuple[Option | None, laws.Law]] = [] if law == "P4" else [(None, LAWS[law])]
    if law in STORED:
        wanted = settings.storages if law == "P4" else settings.also_stored
        known = [s for s in wanted if s.partition("_")[0] in subject.storages]
        checks += [(("--storage", s), functools.partial(STORED[law], storage=s)) for s in known]
    return checks


def _errors(
    operator: Operator, subject: Subject, named: _NamedGaps, report: Report, say: Callable[[str], None]
) -> None:
    """P1 for the calls that torch refuses."""
    if not isinstance(operator, DatabaseOperator) or not operator.leading:
        return
    for sample in operator.error_samples():
        if not sample.tensors:
            continue
        description = f"{str(sample.dtype).removeprefix('torch.')} error {sample.number} unstored"
        line = f"python -m op_registry check --op {operator.name} --law P1"
        say(line)
        outcome = outcome_of(laws.same_errors, Trial(subject, sample, _none(sample)))
        status, message = named.judged("P1", description, *outcome)
        _keep(report, "P1", description, status, message, line)


def _none(sample: Sample) -> Any:
    made = masking("unstored", sample.tensors)
    assert made is not None
    return made


def _keep(report: Report, law: str, description: str, status: str, message: str, line: str) -> None:
    report.counts.setdefault(law, Counter())[status] += 1
    report.dtypes.setdefault(description.partition(" ")[0], Counter())[status] += 1
    if status == "densified" or (status == "not asked" and message.startswith("no oracle")):
        report.reasons[message] = report.reasons.get(message, 0) + 1
    elif status not in ("pass", "not asked"):
        report.outcomes.append(Outcome(law, description, status, message, line))


def outcome_of(check: laws.Law, trial: Trial) -> tuple[str, str]:
    """The status of one trial, and what there is to say about it."""
    try:
        check(trial)
    except NotAsked as reason:
        return "not asked", str(reason)
    except Densified as reason:
        return "densified", str(reason)
    except Broken as reason:
        return "broken", str(reason)
    except (Refusal, MaskedSemanticsError) as reason:
        if _refused_by_the_semantics(trial):
            return "not asked", f"refused, as it has to be: {_first_line(reason)}"
        return "refused", _first_line(reason)
    except Exception as error:
        if laws.plain_fails(trial):
            return "not asked", "plain torch raises as well"
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
        return "error", f"{type(error).__name__}: {_first_line(error)}{where}"
    return "pass", ""


def _refused_by_the_semantics(trial: Trial) -> bool:
    """Whether the oracles know no answer to this call, and say that there is none."""
    try:
        trial.expected()
    except Refused:
        return True
    except Exception:
        # No oracle, or the trial cannot be had: nobody says that it has to be refused.
        return False
    return False


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
