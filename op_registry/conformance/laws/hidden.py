"""P3 and P4: what lies under a mask, and how a tensor is stored, has no effect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import BITS, Outcome, greatest, outcome_difference, repeats_itself
from op_registry.conformance.law import (
    Broken,
    Densified,
    Law,
    NotAsked,
    Refusal,
    RefusedRightly,
    Trial,
    check_storage_applies,
    outcome_with_gradients,
    refused_by_the_semantics,
)
from op_registry.conformance.laws.values import own_lowerings
from op_registry.conformance.masks import FILLS, KNOWN_ZERO, PARTIAL, WHOLE, ZERO
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.sample import Sample
from op_registry.errors import MaskedSemanticsError
from op_registry.records.fill import small_as_large

Again = Callable[[], "Outcome | Exception"]


def non_interference(trial: Trial) -> None:
    """P3: results, masks, gradients and errors don't depend on the data under the mask, bit for bit.

    We take gradients of all results, or of a part if plain torch, too, refuses to differentiate them all.
    """
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    run_base = functools.partial(outcome_with_gradients, trial, None)
    base = run_base()
    for fill in fills_for(trial):
        refilled = outcome_with_gradients(trial, fill)
        if isinstance(base, Exception) or isinstance(refilled, Exception):
            if type(base) is not type(refilled):
                raise Broken(f"with {fill} under the mask {what_happened(refilled)}, otherwise {what_happened(base)}")
            continue
        same_bits(f"with {fill} under the mask", refilled, base, trial, run_base)
    if isinstance(base, tuple):
        _without_derivatives(trial)
        _of_what_is_known_to_be_zero(trial, base)
    if isinstance(base, MaskedSemanticsError) and refused_by_the_semantics(trial):
        raise RefusedRightly(str(base))  # with every fill
    if isinstance(base, MaskedSemanticsError):
        raise Refusal(str(base))
    if isinstance(base, Exception):
        whole = replace(trial.sample, differentiable_part=Sample.differentiable_part, twice_differentiable=False)
        if plain_torch.derivative(whole, trial.seed).why != f"plain torch raises {one_line(base)}":
            raise base
        for asked in _without_a_derivative_and_of_its_part(trial.sample):
            non_interference(replace(trial, sample=asked))


def _without_a_derivative_and_of_its_part(sample: Sample) -> tuple[Sample, Sample]:
    """The call for its results alone, and the call for the part of them that torch can differentiate.

    (Most functions of eigenvectors, which have an arbitrary phase, have no derivative.)
    """

    @functools.wraps(sample.fn)
    def part(*args: Any, **kwargs: Any) -> Any:
        return sample.differentiable_part(sample.fn(*args, **kwargs))

    values = replace(sample, differentiable=False)
    return values, replace(sample, fn=part, differentiable_part=Sample.differentiable_part)


def _without_derivatives(trial: Trial) -> None:
    """Broken unless the results are the same without autograd: such calls have their own code paths.

    For a call without a derivative, the trial itself has tested this.
    """
    if trial.derivative_order == 0:
        return

    def results(fill: str | None = None) -> Outcome:
        return trial.outcome(fill), []

    base = results()
    for fill in WITHOUT_DERIVATIVES:
        same_bits(f"without a derivative, with {fill} under the mask", results(fill), base, trial, results)


# NaN and infinity survive a multiplication by the mask; a large number does not, but changes a sum.
WITHOUT_DERIVATIVES = ("nan", "max")


def _of_what_is_known_to_be_zero(trial: Trial, base: Outcome) -> None:
    """Broken unless the result is the same up to rounding, and every remembered fact about the results is true.

    (Data that needs no fill keeps its strides, on which the rounding of some kernels depends.)
    """
    with small_as_large():
        refilled = outcome_with_gradients(trial, KNOWN_ZERO)
        if isinstance(refilled, Exception):
            raise Broken(f"with {KNOWN_ZERO} under the mask {what_happened(refilled)}, otherwise {what_happened(base)}")
        if trial.derivative_order > 0:
            trial.outcome(KNOWN_ZERO)  # tests the facts remembered without autograd
    wrong = _differ_beyond_rounding(refilled, base, trial)
    if wrong:
        raise Broken(f"with {KNOWN_ZERO} under the mask: {wrong}")


def what_happened(outcome: Outcome | Exception) -> str:
    return f"it raises {one_line(outcome)}" if isinstance(outcome, Exception) else "it gives a result"


def fills_for(trial: Trial) -> Sequence[str]:
    """Every fill if the hidden data is floating-point, else the fills that differ as integers; ZERO at the end."""
    hidden = [t for t, m in zip(trial.sample.tensors, trial.masks, strict=True) if m is not None and not bool(m.all())]
    floating = any(t.is_floating_point() or t.is_complex() for t in hidden)
    return (*FILLS, ZERO) if floating else ("nan", "inf", "tiny", ZERO)


def same_bits(name: str, outcome: Outcome, base: Outcome, trial: Trial, again: Again) -> None:
    """Broken unless two runs agree in results and gradients, bit for bit.

    again  repeats the run of `base`: if that also changes bits, the two need only agree up to rounding
    """

    def same(mine: Outcome | Exception, theirs: Outcome | Exception) -> bool:
        return isinstance(mine, tuple) and isinstance(theirs, tuple) and not bits_differ(mine, theirs, trial)

    wrong = bits_differ(outcome, base, trial)
    first: Outcome | Exception = base
    if wrong and (_differ_beyond_rounding(outcome, base, trial) or repeats_itself(again, first, same)):
        raise Broken(f"{name}: {wrong}")


def bits_differ(outcome: Outcome, base: Outcome, trial: Trial) -> str | None:
    return outcome_difference(outcome, base, replace(BITS, values=not trial.sample.valueless), BITS)


def _differ_beyond_rounding(outcome: Outcome, base: Outcome, trial: Trial) -> str | None:
    return outcome_difference(outcome, base, trial.tolerance, replace(trial.tolerance, values=True))


# ---------------------------------------------------- p4: semantics don't depend on storage; P3 and P5 on every storage

# We compare every trial with the same call on dense storage. P4 stores the valid elements, with NaN in the invalid
# elements of stored blocks or dense dimensions. P3 also stores invalid elements explicitly, with different fills. P5
# compares gradients up to second order, in float64.


def layouts_agree(trial: Trial, storage: str) -> None:
    """P4: results and gradients equal those of dense storage, with NaN in every stored invalid element."""
    check_storage_applies(trial, storage)
    dense = trial.once("on dense storage", _on_dense_storage)
    trial.subject.densified()  # forget earlier conversions
    stored = outcome_with_gradients(trial, "nan", storage)
    densified = trial.subject.densified()
    try:
        _same_as_dense(f"stored as {storage}", stored, dense, trial)
    except Broken as how:
        raise Broken(f"{how}{own_lowerings(trial)}") from how.__cause__
    if densified:
        raise Densified(densified[0])


def non_interference_stored(trial: Trial, storage: str) -> None:
    """P3: the same bits and errors whatever the stored invalid elements hold, and those of dense storage."""
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    check_storage_applies(trial, storage)
    fills = fills_for(trial)
    first, second = fills[0], fills[len(fills) // 2]
    run_with_first = functools.partial(outcome_with_gradients, trial, first, storage, explicit_invalid=True)
    with_first = run_with_first()
    with_second = outcome_with_gradients(trial, second, storage, explicit_invalid=True)
    name = f"stored as {storage} with {second} in stored invalid elements"
    if isinstance(with_first, Exception) or isinstance(with_second, Exception):
        if type(with_first) is not type(with_second):
            raise Broken(f"{name} {what_happened(with_second)}, with {first} {what_happened(with_first)}")
    else:
        same_bits(name, with_second, with_first, trial, run_with_first)
    dense = trial.once("on dense storage", _on_dense_storage)
    _same_as_dense(f"stored as {storage} with {first} in stored invalid elements", with_first, dense, trial)


def _on_dense_storage(trial: Trial) -> Outcome | Exception:
    """Results and gradients on dense storage, without their graphs."""
    outcome = outcome_with_gradients(trial, None)
    if isinstance(outcome, Exception):
        return outcome
    results, gradients = ([_detached(value) for value in part] for part in outcome)
    return results, gradients


def _detached(value: Any) -> Any:
    return (value[0].detach(), value[1]) if isinstance(value, tuple) else value


def _same_as_dense(name: str, stored: Outcome | Exception, dense: Outcome | Exception, trial: Trial) -> None:
    """Broken unless the outcome on this storage is that of dense storage, to rounding."""
    if isinstance(dense, Exception):
        if isinstance(dense, MaskedSemanticsError) != isinstance(stored, MaskedSemanticsError) or not isinstance(
            stored, Exception
        ):
            raise Broken(f"{name}: {_result_or_error(stored)}, dense: {_result_or_error(dense)}")
        raise NotAsked("refused or wrong on dense storage too")
    if isinstance(stored, MaskedSemanticsError):
        raise Broken(f"{name}: {_result_or_error(stored)}, dense: a result") from stored
    if isinstance(stored, Exception):
        raise stored
    # Gradients of one call share intermediate results, so rounding errors scale with the greatest of them.
    magnitude = max(trial.magnitude, greatest(dense[1]))
    of_gradients = replace(trial.tolerance, magnitude=magnitude, absent_is_zero=True)
    wrong = outcome_difference(stored, dense, trial.tolerance, of_gradients)
    if wrong:
        raise Broken(f"{name}: {wrong}")


def _result_or_error(outcome: Outcome | Exception) -> str:
    return one_line(outcome) if isinstance(outcome, Exception) else "a result"


LAWS = (
    Law(
        "P3",
        "the data under the mask has no effect",
        non_interference,
        stored=non_interference_stored,
        masks=PARTIAL,
    ),
    Law("P4", "the same in every storage", stored=layouts_agree, whole=WHOLE),
)
