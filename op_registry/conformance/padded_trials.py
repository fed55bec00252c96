"""The trials of P9 of one operator: each rule that its samples call, on ragged batches of these calls."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.conformance.padded_batches import batch_is_its_samples, samples_agree
from op_registry.conformance.ragged import (
    DRAWS,
    FEW_DRAWS,
    GARBAGE,
    OF_FORMS,
    Draw,
    NoBatch,
    Ragged,
    axes_of,
    labels_of_formula,
    widened,
)
from op_registry.conformance.sample import Operator, Sample, chosen
from op_registry.conformance.stated_dims import calls_of_operators, size_of_call
from op_registry.conformance.stored_samples import storable
from op_registry.conformance.subject import Subject
from op_registry.conformance.trial import Broken, NotAsked
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.movements import Unknown
from op_registry.laws.categories import COMPOSITE
from op_registry.registry import registry
from op_registry.rule import Rule, packet_name
from op_registry.schema import mutable_forms

# How many calls of one overload are asked at most, and among how many samples they are looked for: for each call, and
# for one of an overload of which there is none yet.
MOST_CALLS, MOST_SAMPLES, MORE_SAMPLES = 3, 5, 40
# The most elements in the tensors of a call.
MOST_ELEMENTS = 1 << 12
_OF_MEMORY = ("empty_like", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class PaddedTrial:
    """One ragged batch of a call of `op`; or why there is none.

    number  that of the sample that makes the call
    form    the in-place or out= form that is called in place of `op`
    """

    op: OpOverload
    number: int
    dtype: torch.dtype
    ragged: Ragged | None
    garbage: str = ""
    why: str = ""
    form: OpOverload | None = None

    @property
    def asked(self) -> OpOverload:
        """The overload that is called."""
        return self.form or self.op

    def run(self, subject: Subject, seed: int, option: tuple[str, str] | None = None) -> None:
        """The law, on dense storage or as an option says: ("--storage", "coo"), ("--mode", "aot_eager")."""
        if self.ragged is None:
            raise NotAsked(self.why)
        kind, name = option or ("", "")
        mode = subject.modes()[name] if kind == "--mode" else None
        storage = name if kind == "--storage" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                batch_is_its_samples(mode or subject, self.ragged, self.garbage, seed, storage, self.form)
            except Broken:
                if mode is not None and not samples_agree(subject, mode, self.ragged, self.garbage, seed):
                    raise NotAsked(f"a sample alone has another result in {name}, too") from None
                raise

    def __str__(self) -> str:
        what = "" if self.ragged is None else f" {self.ragged.draw}, {self.ragged.axes}"
        return f"{str(self.dtype).removeprefix('torch.')} sample {self.number} padded {self.asked}{what}"


def padded_trials(
    operator: Operator, seed: int, most: int | None, sample: int | None, left_out: Callable[[OpOverload], bool]
) -> Iterator[PaddedTrial]:
    """Ragged batches of the calls that an operator's samples make.

    most      how many calls of an overload are asked (MOST_CALLS at most); None: of all samples
    sample    the number of the only sample that is taken
    left_out  whether an overload is asked elsewhere
    """
    if not operator.dtypes or not operator.leading:
        return
    dtype = operator.gradient_dtype or operator.preferred_dtype
    calls: Counter[OpOverload] = Counter()
    forms: set[OpOverload] = set()
    enough = MOST_CALLS if most is None else min(most, MOST_CALLS)
    samples, more = _samples(operator, dtype, most, sample)
    for n, made in enumerate([*samples, *more]):
        if n >= len(samples) and all(calls.values()):
            return
        for op, args, kwargs in calls_of_operators(made):
            rule = registry.get(op)
            if rule is None or op._schema.is_mutable or left_out(op) or calls[op] >= enough:
                continue
            draws = FEW_DRAWS if enough == 1 else DRAWS
            found = list(_of_call(rule, op, args, kwargs, made, dtype, seed, draws))
            calls[op] += any(trial.ragged is not None for trial in found)
            yield from found
            for form in mutable_forms(op):
                of_form = [replace(t, form=form) for t in found if t.ragged is not None and t.ragged.draw in OF_FORMS]
                if form not in forms and of_form:
                    forms.add(form)
                    yield from of_form


def _samples(
    operator: Operator, dtype: torch.dtype, most: int | None, number: int | None
) -> tuple[list[Sample], list[Sample]]:
    """The samples whose calls are asked, and more, for overloads of which these make no call on a batch."""
    samples = [s for s in operator.samples(dtype) if s.tensors]
    if number is not None:
        return [s for s in [*samples, *storable(samples)] if s.number == number][:1], []
    samples = [s for s in samples if all(t.numel() for t in s.tensors)] or samples
    if most is None:
        return samples, storable(samples)
    first = chosen(samples, MOST_SAMPLES * min(most, MOST_CALLS))
    # (Samples of unary operators have one dimension; folded, they have two.)
    return first, [s for s in [*storable(samples), *samples] if s not in first][:MORE_SAMPLES]


def _of_call(
    rule: Rule,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Sample,
    dtype: torch.dtype,
    seed: int,
    draws: Sequence[Draw],
) -> Iterator[PaddedTrial]:
    call = Bound.of(rule, op, args, kwargs)
    if size_of_call(args, kwargs) > MOST_ELEMENTS or any(not _is_strided(t) for t in call.tensors.values()):
        return
    why, formula = _nothing_stated(rule, call), rule.category is COMPOSITE and not rule.is_built_in
    if why is None or formula:
        try:
            labels = labels_of_formula(call, seed) if formula else call.labels
            assert labels is not None
            if not formula:
                call, labels = _of_several_samples(call, labels)
            for axes in axes_of(call, labels):
                for n, draw in enumerate(draws):
                    try:
                        ragged = Ragged(rule, op, call, labels, axes, draw, seed)
                    except NoBatch:
                        continue
                    yield PaddedTrial(op, made.number, dtype, ragged, GARBAGE[n % len(GARBAGE)])
            return
        except NoBatch as reason:
            why = str(reason)
    yield PaddedTrial(op, made.number, dtype, None, why=why)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _nothing_stated(rule: Rule, call: Bound) -> str | None:
    """Why nothing is known of a call's dimensions; None if something is."""
    if rule.category is COMPOSITE:
        return "it is written in operators that have rules"
    if rule.dims is None:
        return "its rule does not state its dimensions"
    if isinstance(rule.dims, Unknown):
        return str(rule.dims)
    if packet_name(call.op) in _OF_MEMORY:
        return "it reads uninitialised memory"
    if call.named.get("num_classes") == -1:
        return "data decide the result's sizes"
    return None if call.labels is not None else "the statement of its dimensions does not fit the call"


__all__ = ["PaddedTrial", "padded_trials"]


def _of_several_samples(call: Bound, labels: Labels) -> tuple[Bound, Labels]:
    """The call with more than one sample, where its other arguments allow one more dimension; else the call itself."""
    wider = widened(call, labels)
    try:
        found = wider.labels
    except RuntimeError:  # a permutation, say, that lists the dimensions of the sample
        found = None
    return (call, labels) if found is None else (wider, found)
