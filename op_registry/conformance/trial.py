"""A trial: one sample under one set of masks, run on one subject; and the exceptions by which a law reports.

A law is a function of a :class:`Trial`. It returns if it holds, and otherwise raises :class:`Broken` with the reason,
:class:`NotAsked` if the trial does not test it, or whatever the subject raised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import ROUNDING, Outcome, Tolerance, bit_difference, mask_difference
from op_registry.conformance.masks import KNOWN_ZERO, Masking, refilled
from op_registry.conformance.oracles import expected
from op_registry.conformance.oracles.call import Refused
from op_registry.conformance.plain_torch import weighted_sum
from op_registry.conformance.sample import Sample, start_random_numbers, tree_leaves, tree_map
from op_registry.conformance.subject import Observed, Subject

T = TypeVar("T")

# The most elements in the tensors of a trial that remembers results.
MOST_REMEMBERED = 1 << 14

# Floating-point dtypes with too few digits for sums and products of the samples' values.
NARROW = (torch.float16, torch.bfloat16)


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
