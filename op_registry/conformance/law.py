"""A law as a value, a case of it, and a trial: one sample under one set of masks, run on one subject.

The cases of most laws are trials: calls of an operator's samples under masks, on dense storage, in other storages, or
in other modes (trials.py). A law about something else brings cases of its own: ragged batches (P9), statements of
dimensions, devices, calls on which torch raises.

A check of a trial returns if the law holds, and otherwise raises :class:`Broken` with the reason, :class:`NotAsked` if
the trial does not test it, or whatever the subject raised.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import ROUNDING, Outcome, Tolerance, bit_difference, mask_difference
from op_registry.conformance.masks import DESCRIPTIONS, KNOWN_ZERO, STORED, Masking, refilled
from op_registry.conformance.oracles import expected
from op_registry.conformance.oracles.call import Misdeclared, OracleFailed, Refused
from op_registry.conformance.plain_torch import first_line, weighted_sum
from op_registry.conformance.sample import Operator, Sample, start_random_numbers, tree_leaves, tree_map
from op_registry.conformance.subject import Observed, Subject
from op_registry.errors import MaskedSemanticsError
from op_registry.rule import IN_A_RULE

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings


class Broken(AssertionError):
    """The law does not hold; the message says how."""


class NotAsked(Exception):
    """The trial does not test the law; the message says why."""


class Densified(Exception):
    """The law holds, but a sparse tensor was converted to dense storage; the message names the operator."""


class Refusal(Exception):
    """The subject refused a call that has a result according to the semantics."""


class RefusedRightly(Exception):
    """The law holds: the semantics refuse the call, and so does the subject."""


# The outcomes of a case, best first. "refused" breaks no law, but tests none either; "refused rightly" is a refusal
# that the semantics require.
Status = Literal["pass", "densified", "refused rightly", "not asked", "refused", "gap", "broken", "error"]
# A command-line option that selects one check of a law: its name and value.
Option = tuple[str, str]
Check = Callable[["Trial"], None]
# A check on another storage, or in another mode, by name.
CheckIn = Callable[["Trial", str], None]
# Why a law does not apply to an operator, or None: given a seed, and why trials had nothing to ask, with their number
# (None before there are any).
Exemption = Callable[[Operator, int, "Mapping[str, int] | None"], "str | None"]


@dataclass(frozen=True)
class Case:
    """One test of a law.

    description  the words by which gaps select it
    run          returns if the law holds, and otherwise raises Broken, NotAsked, or whatever the subject raised
    option       the option that selects the storage or the mode
    repeat       the options of `check` that select it among the law's other cases
    trial        the call that it tests, if it is one under masks
    asked_of     the overload whose rule it tests, for a law that is asked of rules
    plain_raises whether it tests a call that plain torch refuses
    known        what comes of it, of a case that has been asked together with others
    """

    description: str
    run: Callable[[], None] = lambda: None
    option: Option | None = None
    repeat: str = ""
    trial: Trial | None = None
    asked_of: str = ""
    plain_raises: bool = False
    known: tuple[Status, str] | None = None

    def outcome(self) -> tuple[Status, str]:
        """The status, and its message."""
        if self.known is not None:
            return self.known
        if self.trial is None:
            return status_of(self.run)
        return outcome_of(lambda trial: self.run(), self.trial, self.plain_raises)


Cases = Callable[[Operator, Subject, "Settings"], Iterator[Case]]


@dataclass(frozen=True)
class Law:
    """A law.

    words         what it says, in a verdict
    check         tests a trial on dense storage
    stored        tests one on another storage
    in_mode       tests one in another mode
    masks         the kinds of masks of its trials
    masks_stored  the same on storages other than dense
    whole         the same for an operator that refuses partly valid input
    one_hole      whether each operator has a trial with one hole in each tensor, not only those of whole slices
    of_gradients  whether trials are made in float64, of operators that have a derivative
    exempt        why it does not apply to an operator
    cases         its cases, if they are no trials
    also          further cases beside its trials
    of_rules      whether it is asked of each rule that a call needs; then refusals are told
    of_plain      whether it is asked of plain torch, whatever the subject
    of_devices    whether it compares a device with the CPU; then it is asked where a device is named, and no other law
    """

    name: str
    words: str
    check: Check | None = None
    stored: CheckIn | None = None
    in_mode: CheckIn | None = None
    masks: tuple[str, ...] = tuple(DESCRIPTIONS)
    masks_stored: tuple[str, ...] = STORED
    whole: tuple[str, ...] = ()
    one_hole: bool = False
    of_gradients: bool = False
    exempt: Exemption | None = None
    cases: Cases | None = None
    also: Cases | None = None
    of_rules: bool = False
    of_plain: bool = False
    of_devices: bool = False


def outcome_of(check: Check, trial: Trial, plain_raises: bool = False) -> tuple[Status, str]:
    """The status of a trial, and its message; a call that plain torch cannot make is not asked."""
    if trial.plain_error is not None and not plain_raises:
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
            return "not asked", f"refused, as the semantics require: {first_line(reason)}"
        return "refused", first_line(reason)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
        rule = str(error).partition(IN_A_RULE)[2]
        named = f"{IN_A_RULE.strip()} {rule}: " if rule else ""
        return "error", f"{named}{type(error).__name__}: {first_line(error)}{where}"
    return "pass", ""


# -------------------------------------------------------------------------------------------------------------- a trial

T = TypeVar("T")

# The most elements in the tensors of a trial that remembers results.
MOST_REMEMBERED = 1 << 14

# Floating-point dtypes with too few digits for sums and products of the samples' values.
NARROW = (torch.float16, torch.bfloat16)


def storage_of(name: str) -> tuple[str, bool]:
    """Parse the name of a storage: the layout, and whether only the first tensor is stored so (``csr_first``)."""
    layout = name.removesuffix("_first")
    return layout, layout != name


@dataclass(frozen=True)
class Trial:
    """One sample under one set of masks, run on one subject."""

    subject: Subject
    sample: Sample
    masking: Masking
    seed: int = 0
    # Results that laws computed for this trial, by name; a derived trial starts without any.
    _computed: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, name: str, compute: Callable[[Trial], T]) -> T:
        """The result of `compute` for this trial, cached by `name`, because every storage compares with it.

        For large operands we compute it again, because a run keeps its trials until its end.
        """
        if sum(t.numel() for t in self.sample.tensors) > MOST_REMEMBERED:
            return compute(self)
        if name not in self._computed:
            self._computed[name] = compute(self)
        return self._computed[name]

    @functools.cached_property
    def masks(self) -> list[Tensor | None]:
        """The full mask of each tensor of the sample; None for one that stays plain."""
        return self.masking.full(self.sample.tensors)

    @functools.cached_property
    def partial(self) -> bool:
        """Whether anything is invalid."""
        return any(mask is not None and not bool(mask.all()) for mask in self.masks)

    def wrapped(
        self,
        fill: str | None = None,
        gradients: bool = False,
        storage: str | None = None,
        explicit_invalid: bool = False,
    ) -> tuple[Any, Any, list[Any]]:
        """Arguments for the subject, and the value of each tensor of the sample among them.

        fill              what overwrites the data under the mask (FILLS, ZERO, KNOWN_ZERO); None leaves it unchanged
        gradients         whether tensors require grad
        storage           how masked tensors are stored, where the storage fits: "csr" all, "csr_first" only the first
        explicit_invalid  whether invalid elements are stored along with the valid ones
        """
        values: list[Any] = []
        layout, only_first = storage_of(storage or "")
        any_stored = False
        owners: dict[int, Any] = {}
        masks = dict(zip(map(id, self.sample.tensors), zip(self.masking.masks, self.masks, strict=True), strict=True))

        def wrap(tensor: Tensor) -> Any:
            nonlocal any_stored
            mask, full = masks[id(tensor)]
            data = refilled(tensor, full, fill) if fill else tensor.detach().clone()
            wanted = gradients and self.may_have_gradient(len(values))
            if isinstance(mask, str):  # PLAIN
                value: Any = self.subject.placed(data).requires_grad_(wanted)
            else:
                value = self.subject.wrap(data, mask, wanted)
                if layout and not (any_stored and only_first):
                    dense, value = value, self.subject.stored(value, layout, wanted, explicit_invalid)
                    any_stored = any_stored or value is not dense
                # (With "csr_first", only the first of them is stored so.)
                owner = owners.setdefault(id(mask), value)
                if mask is not None and owner is not value and type(owner) is type(value):
                    value = self.subject.sharing(value, owner)
            values.append(value)
            return value

        args, kwargs = self.sample.with_tensors(wrap)
        return args, kwargs, values

    def plain(self) -> Any:
        """Plain torch's result, and the tensors that it wrote to without returning them."""
        written = self.written
        args, kwargs, copies = self.sample.copies(placed=self.subject.placed)
        start_random_numbers(self.seed)
        result = self.sample.fn(*args, **kwargs)
        return tree_map(self.subject.brought, (result, [copies[n] for n in written]))

    def on_other_values(
        self, masked_only: bool = False, change: Callable[[Tensor], Tensor] = plain_torch.in_reverse
    ) -> Trial:
        """The same call with `change` applied to its tensors (with `masked_only`, to the masked ones)."""
        masked = {id(t): mask is not None for t, mask in zip(self.sample.tensors, self.masks, strict=True)}

        def changed(tensor: Tensor) -> Tensor:
            return change(tensor) if masked[id(tensor)] or not masked_only else tensor.detach().clone()

        args, kwargs = self.sample.with_tensors(changed)
        return dataclasses.replace(self, sample=dataclasses.replace(self.sample, args=args, kwargs=kwargs))

    def outcome(self, fill: str | None = None) -> list[Any]:
        """The subject's results, then the arguments written to: (data, mask or None) of tensors, or Python values."""
        args, kwargs, values = self.wrapped(fill)
        result = self.run_on(args, kwargs, values, fill)
        return observed(self.subject, [result, [values[n] for n in self.written]])

    def run_on(self, args: Sequence[Any], kwargs: Mapping[str, Any], values: list[Any], fill: str | None = None) -> Any:
        """The subject's result; Broken if one of the operands `values` was modified that plain torch doesn't modify.

        If the operands have zeros under the mask (`fill`), we tell the subject so.
        """
        before = [self._copied(value) for value in values]
        if fill == KNOWN_ZERO:
            self.remember_zero(values)
        result = self.run(args, kwargs)
        for value in values:
            self.subject.check_remembered(value)
        self._check_unmodified(values, before)
        return result

    def remember_zero(self, values: Sequence[Any]) -> None:
        """Tell the subject that the data under the mask of operands is zero."""
        for value, mask in zip(values, self.masking.masks, strict=True):
            if not isinstance(mask, str):  # PLAIN
                self.subject.remember_zero(value)

    def _copied(self, value: object) -> Observed:
        """Copies of a value's data and mask."""
        data, mask = self.subject.observe(value)
        return data.detach().clone(), None if mask is None else mask.clone()

    def _check_unmodified(self, values: list[Any], before: list[Observed]) -> None:
        """Broken unless operands that plain torch doesn't write to keep mask and data, bit for bit.

        That includes the data under the mask, which may be the caller's memory.
        """
        touched = plain_torch.forward(self.sample, self.seed).touched
        for position, (value, (data, mask)) in enumerate(zip(values, before, strict=True)):
            if position in touched:
                continue
            data_after, mask_after = self.subject.observe(value)
            wrong = bit_difference(data_after, data)
            if not wrong and mask is not None:
                wrong = "it is plain" if mask_after is None else mask_difference(mask_after, mask)
            if wrong:
                raise Broken(f"operand {position} was modified by the call: {wrong}")

    def may_have_gradient(self, position: int) -> bool:
        """Whether to differentiate with respect to a tensor of the sample (see :func:`plain_torch.variables`)."""
        return position in plain_torch.variables(self.sample, self.seed)

    @property
    def derivative_order(self) -> int:
        """How often plain torch can differentiate the call, up to twice; determined by trying (plain_torch.py)."""
        return plain_torch.derivative(self.sample, self.seed).order

    @functools.cached_property
    def magnitude(self) -> float:
        """The largest magnitude among operands of NARROW dtypes: rounding errors scale with it. At least 1."""
        magnitudes = [
            t.abs()[t.isfinite()].max() for t in self.sample.tensors if t.dtype in NARROW and bool(t.isfinite().any())
        ]
        return max([1.0, *map(float, magnitudes)])

    @functools.cached_property
    def rounding(self) -> float:
        """The rounding of the coarsest operand: results computed from it are no more accurate."""
        return max((ROUNDING.get(t.dtype, 0.0) for t in self.sample.tensors), default=0.0)

    @property
    def tolerance(self) -> Tolerance:
        """To which rounding its results have to agree."""
        return Tolerance(magnitude=self.magnitude, coarsest=self.rounding, values=not self.sample.valueless)

    @property
    def written(self) -> tuple[int, ...]:
        """Which tensors of the sample plain torch writes to without returning them."""
        return plain_torch.forward(self.sample, self.seed).written

    @property
    def plain_error(self) -> str | None:
        """Plain torch's error if it can't run the call: the only excuse for a failing trial."""
        return plain_torch.forward(self.sample, self.seed).error

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The subject's result, with the random number generators seeded as in every other run."""
        start_random_numbers(self.seed)
        return self.subject.call(self.sample.fn, *args, **kwargs)

    def expected(self) -> list[Any]:
        """The oracles' results: Expected, plain tensors and Python values."""
        args, kwargs, copies = self.sample.copies()
        masks = {id(t): m for t, m in zip(copies, self.masks, strict=True) if m is not None}
        also = [copies[n] for n in self.written]
        start_random_numbers(self.seed)
        return tree_leaves(expected(self.sample.fn, args, kwargs, masks, also))


def observed(subject: Subject, result: object) -> list[Any]:
    """Each leaf of a result: (data, mask or None) of a tensor, other values unchanged."""
    leaves = tree_leaves(result, is_leaf=subject.is_value)
    for leaf in filter(subject.is_value, leaves):  # before `observe` exposes data, which ends every remembered fact
        subject.check_remembered(leaf)
    return [subject.observe(leaf) if subject.is_value(leaf) else leaf for leaf in leaves]


def refused_by_the_semantics(trial: Trial) -> bool:
    """Whether the semantics refuse this call, according to the oracles."""
    try:
        trial.expected()
    except Refused:
        return True
    except Exception:
        # Unknown: there is no oracle, or plain torch can't run the call.
        return False
    return False


def check_storage_applies(trial: Trial, storage: str) -> None:
    """NotAsked if no tensor fits the storage or, for "csr_first" and its like, only one (then "csr" tests the same)."""
    layout, only_first = storage_of(storage)
    if trial.once(f"tensors stored as {layout}", lambda trial: _tensors_stored(trial, layout)) < 1 + only_first:
        raise NotAsked(f"no tensor that can be stored as {storage}")


def _tensors_stored(trial: Trial, layout: str) -> int:
    """How many of the operands the layout can store."""
    dense = trial.once("dense operands", lambda trial: [type(value) for value in trial.wrapped()[2]])
    return sum(type(a) is not b for a, b in zip(trial.wrapped(storage=layout)[2], dense, strict=True))


def outcome_with_gradients(
    trial: Trial, fill: str | None, storage: str | None = None, explicit_invalid: bool = False
) -> Outcome | Exception:
    """Results and, where there is a derivative, gradients of a fixed weighting of them; or the exception raised."""
    try:
        differentiable = trial.derivative_order > 0
        args, kwargs, values = trial.wrapped(
            fill, gradients=differentiable, storage=storage, explicit_invalid=explicit_invalid
        )
        outcome = observed(trial.subject, trial.run_on(args, kwargs, values, fill))
        gradients = gradients_of(trial.subject, outcome, values) if differentiable else []
        return outcome, gradients
    except Broken:
        raise
    except Exception as error:
        return error


def gradients_of(
    subject: Subject, outcome: Sequence[Any], values: Sequence[Any], create_graph: bool = False, seed: int = 0
) -> list[Any]:
    """The gradient of the weighted results for each value that may have one, observed; None elsewhere.

    Empty if no result requires grad.
    """
    scalar = weighted_sum(outcome, seed)
    if scalar is None:
        return []
    inputs = [v for v in values if subject.requires_grad(v)]
    found = subject.gradients(scalar, inputs, create_graph)
    for gradient in found:
        if gradient is not None:
            subject.check_remembered(gradient)
    remaining = iter(found)
    gradients = [next(remaining) if subject.requires_grad(v) else None for v in values]
    return [None if g is None else subject.observe(g) for g in gradients]
