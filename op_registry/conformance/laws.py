"""The laws P1, P2 and P3 as checks on one trial.

P4 is in storages.py, P5 in gradients.py, P6 and P7 in modes.py, P8 in closed.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import bit_difference, difference, mask_difference
from op_registry.conformance.conditioning import explained_by_rounding
from op_registry.conformance.likely_causes import likely_cause
from op_registry.conformance.masks import FILLS, KNOWN_ZERO, ZERO
from op_registry.conformance.oracles.call import Expected, NoOracle, Refused
from op_registry.conformance.other_numbers import with_other_numbers
from op_registry.conformance.plain_torch import levelled, one_line, weighted_sum
from op_registry.conformance.repeats import repeats_itself
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject
from op_registry.conformance.ties import equally_right
from op_registry.conformance.trees import tree_leaves
from op_registry.conformance.trial import (
    Broken,
    NotAsked,
    Refusal,
    RefusedRightly,
    Trial,
    observed,
    refused_by_the_semantics,
)
from op_registry.errors import MaskedSemanticsError
from op_registry.records.fill import small_as_large

# Observed results and gradients of one run.
Outcome = tuple[list[Any], list[Any]]
Again = Callable[[], "Outcome | Exception"]


def all_valid_identity(trial: Trial) -> None:
    """P1: with every element valid, the result is plain torch's: values, dtype, shape, and strides of views."""
    if trial.partial:
        raise NotAsked("something is invalid")
    if trial.masking.kind == "unstored":  # the first trial of these operands
        _make_earlier_calls(trial)
    want = tree_leaves(trial.plain())
    got = trial.outcome()
    if len(got) != len(want):
        raise Broken(f"{len(got)} results instead of {len(want)}")
    bitwise = trial.masking.kind == "unstored"
    for position, (mine, plain) in enumerate(zip(got, want, strict=True)):
        _same_as_plain(position, mine, plain, bitwise, trial)


def _make_earlier_calls(trial: Trial) -> None:
    """Make the call on other tensors, with other numbers and with its own.

    A rule's caches from these calls must not affect the call under test.
    """
    renumbered = dataclasses.replace(trial, sample=with_other_numbers(trial.sample, trial.seed))
    different = [renumbered] if renumbered.sample is not trial.sample else []
    for earlier in map(_on_distinguishing_values, (*different, trial)):
        with contextlib.suppress(Exception):  # the changed values may lie outside the operator's domain
            args, kwargs, _ = earlier.wrapped()
            earlier.run(args, kwargs)


def _on_distinguishing_values(trial: Trial) -> Trial:
    """The call on values for which plain torch gives another result.

    We try reversed values first. They don't change every result (a reversed matrix keeps its rank).
    """
    reverse = trial.on_other_values()
    with contextlib.suppress(Exception):
        return trial.on_other_values(change=levelled) if _same_results(reverse.plain(), trial.plain()) else reverse
    return reverse


def _same_results(mine: object, theirs: object) -> bool:
    pairs = zip(tree_leaves(mine), tree_leaves(theirs), strict=True)
    return all(not bit_difference(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _plain_repeats_itself(trial: Trial, position: int, plain: Tensor) -> bool:
    return repeats_itself(
        lambda: tree_leaves(trial.plain())[position].clone(), plain, lambda a, b: not bit_difference(a, b)
    )


def _same_as_plain(position: int, mine: object, plain: object, bitwise: bool, trial: Trial) -> None:
    name = f"result {position}"
    if not isinstance(plain, Tensor):
        if mine != plain and not (mine != mine and plain != plain):
            raise Broken(f"{name}: {mine!r} instead of {plain!r}")
        return
    if not isinstance(mine, tuple):
        raise Broken(f"{name}: {mine!r} instead of a tensor")
    data, mask = mine
    if plain.layout is not torch.strided:
        raise NotAsked(f"the result is {plain.layout}")
    if trial.sample.uninitialised:
        if plain.numel() and (mask is None or bool(mask.any())):
            raise Broken(f"{name}: valid elements in uninitialised memory")
    elif mask is not None and not bool(mask.all()):
        raise Broken(
            f"{name}: invalid elements although every operand is valid: {mask_difference(mask, torch.ones_like(mask))}"
        )
    if trial.sample.valueless:
        if data.shape != plain.shape or data.dtype is not plain.dtype:
            raise Broken(f"{name}: {data.dtype} {tuple(data.shape)} instead of {plain.dtype} {tuple(plain.shape)}")
        return
    wrong = bit_difference(data, plain) if bitwise else None
    if not bitwise or (wrong and not _plain_repeats_itself(trial, position, plain)):
        wrong = difference(data, plain, magnitude=trial.magnitude, coarsest=trial.rounding)
    if wrong and not (not bitwise and equally_right(trial.sample, position, data, plain)):
        raise Broken(f"{name}: {wrong}")
    if plain._is_view() and plain.numel():
        mine_strides, strides = ([t.stride(d) for d in range(t.ndim) if t.shape[d] > 1] for t in (data, plain))
        if mine_strides != strides:
            raise Broken(f"{name}: strides {data.stride()} instead of {plain.stride()} for shape {tuple(plain.shape)}")


def same_errors(trial: Trial) -> None:
    """P1 for calls on which plain torch raises: the same exception, with every tensor masked and valid."""
    try:
        trial.plain()
    except Exception as error:
        wanted = error
    else:
        raise NotAsked("plain torch does not raise on this machine")
    try:
        trial.outcome()
    except MaskedSemanticsError as error:
        raise Refusal(str(error)) from error
    except Exception as error:
        if isinstance(error, type(wanted)):
            return
        raise Broken(f"{one_line(error)}, instead of {one_line(wanted)}") from error
    raise Broken(f"no error, instead of {one_line(wanted)}")


def compress(trial: Trial) -> None:
    """P2, P8: valid values and masks equal the oracle's; the subject refuses the calls that the oracle refuses."""
    try:
        want = trial.expected()
    except Refused as reason:
        try:
            trial.outcome()
        except MaskedSemanticsError:
            raise RefusedRightly(str(reason)) from None
        raise Broken(f"a result, although the semantics refuse {reason}") from None
    except NoOracle as reason:
        raise NotAsked(f"no oracle: {reason}") from None
    got = trial.outcome()
    if len(got) != len(want):
        raise Broken(f"{len(got)} results instead of {len(want)}")
    for position, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        _same_as_expected(position, mine, theirs, trial)


def _same_as_expected(position: int, mine: object, theirs: object, trial: Trial) -> None:
    name = f"result {position}"
    if not isinstance(theirs, (Expected, Tensor)):
        if mine != theirs and not (mine != mine and theirs != theirs):
            raise Broken(f"{name}: {mine!r} instead of {theirs!r}")
        return
    if not isinstance(mine, tuple):
        raise Broken(f"{name}: {mine!r} instead of a tensor")
    data, mask = mine
    if isinstance(theirs, Tensor):
        # A plain result is expected; a masked one without invalid elements is equivalent.
        if mask is not None and not bool(mask.all()):
            raise Broken(f"{name}: invalid elements where a plain result is expected")
        wrong = None if trial.sample.valueless else difference(data, theirs)
        if wrong:
            raise Broken(f"{name}: {wrong}")
        return
    if mask is None:
        if not theirs.all_valid:
            raise Broken(f"{name}: a plain tensor, where {int((~theirs.mask).sum())} elements are invalid")
        mask = theirs.mask
    wrong = mask_difference(mask, theirs.mask)
    if not wrong and trial.sample.valueless:
        wrong = None if data.dtype is theirs.data.dtype else f"dtype {data.dtype} instead of {theirs.data.dtype}"
    elif not wrong:
        wrong = difference(data, theirs.data, mask, magnitude=trial.magnitude, coarsest=trial.rounding)
        if wrong and (
            equally_right(trial.sample, position, data, theirs.data, mask)
            or explained_by_rounding(trial, position, data, theirs.data, mask)
        ):
            wrong = None
    if wrong:
        raise Broken(f"{name}: {wrong}{likely_cause(trial, position, data, theirs)}")


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
        whole = dataclasses.replace(
            trial.sample, differentiable_part=Sample.differentiable_part, twice_differentiable=False
        )
        if plain_torch.derivative(whole, trial.seed).why != f"plain torch raises {one_line(base)}":
            raise base
        for asked in _without_a_derivative_and_of_its_part(trial.sample):
            non_interference(dataclasses.replace(trial, sample=asked))


def _without_a_derivative_and_of_its_part(sample: Sample) -> tuple[Sample, Sample]:
    """The call for its results alone, and the call for the part of them that torch can differentiate.

    (Most functions of eigenvectors, which have an arbitrary phase, have no derivative.)
    """

    @functools.wraps(sample.fn)
    def part(*args: Any, **kwargs: Any) -> Any:
        return sample.differentiable_part(sample.fn(*args, **kwargs))

    values = dataclasses.replace(sample, differentiable=False)
    return values, dataclasses.replace(sample, fn=part, differentiable_part=Sample.differentiable_part)


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
    wrong = outcomes_differ(refilled, base, trial, to_rounding=True)
    if wrong:
        raise Broken(f"with {KNOWN_ZERO} under the mask: {wrong}")


def fills_for(trial: Trial) -> Sequence[str]:
    """Every fill if the hidden data is floating-point, else the fills that differ as integers; ZERO at the end."""
    hidden = [t for t, m in zip(trial.sample.tensors, trial.masks, strict=True) if m is not None and not bool(m.all())]
    floating = any(t.is_floating_point() or t.is_complex() for t in hidden)
    return (*FILLS, ZERO) if floating else ("nan", "inf", "tiny", ZERO)


def what_happened(outcome: Outcome | Exception) -> str:
    return f"it raises {one_line(outcome)}" if isinstance(outcome, Exception) else "it gives a result"


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


def same_bits(name: str, outcome: Outcome, base: Outcome, trial: Trial, again: Again) -> None:
    """Broken unless two runs agree in results and gradients, bit for bit.

    again  repeats the run of `base`: if that also changes bits, the two need only agree up to rounding
    """
    wrong = outcomes_differ(outcome, base, trial)
    if not wrong:
        return

    def same(mine: Outcome | Exception, theirs: Outcome | Exception) -> bool:
        return isinstance(mine, tuple) and isinstance(theirs, tuple) and not outcomes_differ(mine, theirs, trial)

    beyond_rounding = outcomes_differ(outcome, base, trial, to_rounding=True)
    first: Outcome | Exception = base
    if beyond_rounding or repeats_itself(again, first, same):
        raise Broken(f"{name}: {wrong}")


def outcomes_differ(outcome: Outcome, base: Outcome, trial: Trial, to_rounding: bool = False) -> str | None:
    """How the results and gradients of two runs differ, bit for bit (or `to_rounding`), or None."""
    for what, mine, theirs in zip(("result", "gradient"), outcome, base, strict=True):
        if len(mine) != len(theirs):
            return f"{len(mine)} {what}s instead of {len(theirs)}"
        for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            name = f"{what} {position}"
            if not isinstance(a, tuple) or not isinstance(b, tuple):
                if a is not b and a != b and not (a != a and b != b):
                    return f"{name} is {a!r} instead of {b!r}"
                continue
            if (a[1] is None) != (b[1] is None):
                return f"{name} is masked in one of two runs"
            wrong = mask_difference(a[1], b[1]) if a[1] is not None else None
            if not wrong and not (trial.sample.valueless and what == "result"):
                wrong = bit_difference(a[0], b[0], a[1])
                if wrong and to_rounding:
                    wrong = difference(a[0], b[0], a[1], magnitude=trial.magnitude, coarsest=trial.rounding)
            if wrong:
                return f"{name}: {wrong}"
    return None
