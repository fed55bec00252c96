"""P4: semantics do not depend on storage; P3 and P5 on every storage.

Every trial has the same call on dense storage beside it. P4 stores what is valid, with NaN wherever something invalid
lies beside it (in blocks, in dense dimensions). P3 stores invalid elements everywhere, with more than one garbage. P5
goes on to second-order gradients, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import difference, mask_difference, short
from op_registry.conformance.gradients import derivatives, judged_derivatives
from op_registry.conformance.laws import fills_for, outcome_with_gradients, said, same_bits
from op_registry.conformance.trial import Broken, Densified, NotAsked, Trial, storage_of
from op_registry.errors import MaskedSemanticsError


def layouts_agree(trial: Trial, storage: str) -> None:
    """Results and gradients stored otherwise are those of dense storage, with NaN wherever something invalid lies."""
    _stored_otherwise(trial, storage)
    base = outcome_with_gradients(trial, None)
    trial.subject.densified()
    again = outcome_with_gradients(trial, "nan", storage)
    densified = trial.subject.densified()
    _as_dense(f"stored as {storage}", again, base, trial)
    if densified:
        raise Densified(densified[0])


def non_interference(trial: Trial, storage: str) -> None:
    """Whatever is stored beside the valid elements: the same bits and errors, and those that dense storage gives."""
    if not trial.partial:
        raise NotAsked("nothing is invalid")
    _stored_otherwise(trial, storage)
    first, second = fills_for(trial)[0], fills_for(trial)[-3]
    base = outcome_with_gradients(trial, first, storage, explicit_invalid=True)
    again = outcome_with_gradients(trial, second, storage, explicit_invalid=True)
    name = f"stored as {storage} with {second} beside what is valid"
    if isinstance(base, Exception) or isinstance(again, Exception):
        if type(base) is not type(again):
            raise Broken(f"{name} {said(again)}, with {first} {said(base)}")
    else:
        same_bits(name, again, base, trial)
    dense = outcome_with_gradients(trial, None)
    _as_dense(f"stored as {storage} with {first} beside what is valid", base, dense, trial)


def gradients_agree(trial: Trial, storage: str) -> None:
    """Gradients of first and second order stored otherwise are those of dense storage, to which P5 itself is put."""
    if trial.derivative_order == 0:
        raise NotAsked(f"no derivative: {plain_torch.derivative(trial.sample, trial.seed).why}")
    _stored_otherwise(trial, storage)
    dense = judged_derivatives(trial)
    stored = derivatives(trial, storage)
    for order, mine, theirs in zip(("gradient", "second-order gradient"), stored, dense, strict=True):
        if mine is not None and theirs is not None:
            _same_to_rounding(f"stored as {storage}: {order}", mine, theirs, trial)
        elif not all(_nothing(gradient) for gradient in mine or theirs or ()):
            raise Broken(f"stored as {storage}: only one of the two has a {order}")


def _stored_otherwise(trial: Trial, storage: str) -> None:
    """NotAsked where this storage is nothing new for any tensor, or for all but the one that is stored so anyway."""
    dense = trial.wrapped()[2]

    def changed(storage: str) -> int:
        stored = trial.wrapped(storage=storage)[2]
        return sum(type(a) is not type(b) for a, b in zip(stored, dense, strict=True))

    layout, only_first = storage_of(storage)
    if changed(layout) < (2 if only_first else 1):
        raise NotAsked(f"no tensor that can be stored as {storage}")


def _as_dense(name: str, again: Any, base: Any, trial: Trial) -> None:
    """What was stored otherwise came out as on dense storage, to rounding."""
    if isinstance(base, Exception):
        if isinstance(base, MaskedSemanticsError) != isinstance(again, MaskedSemanticsError) or not isinstance(
            again, Exception
        ):
            raise Broken(f"{name}: {_told(again)}, dense: {_told(base)}")
        raise NotAsked("refused or wrong on dense storage too")
    if isinstance(again, MaskedSemanticsError):
        raise Broken(f"{name}: {_told(again)}, dense: a result") from again
    if isinstance(again, Exception):
        raise again
    _same_to_rounding(f"{name}: result", again[0], base[0], trial)
    # Gradients of one call are made of the same intermediate results: the greatest says what rounding may cost.
    _same_to_rounding(f"{name}: gradient", again[1], base[1], trial, greatest=_greatest(base[1]))


def _told(outcome: Any) -> str:
    return f"{type(outcome).__name__}: {str(outcome)[:160]}" if isinstance(outcome, Exception) else "a result"


def _greatest(observed: Sequence[Any]) -> float:
    """The largest finite magnitude among what was observed valid."""
    found = [0.0]
    for value in observed:
        if isinstance(value, tuple) and (value[0].is_floating_point() or value[0].is_complex()):
            valid = value[0] if value[1] is None else value[0][value[1]]
            finite = valid.abs()[valid.isfinite()]
            found += [float(finite.max())] if finite.numel() else []
    return max(found)


def _same_to_rounding(
    name: str, mine: Sequence[Any], theirs: Sequence[Any], trial: Trial, greatest: float = 0.0
) -> None:
    if len(mine) != len(theirs):
        raise Broken(f"{name}: {len(mine)} instead of {len(theirs)}")
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(a, tuple) or not isinstance(b, tuple):
            if not (_nothing(a) and _nothing(b)) and a is not b and a != b and not (a != a and b != b):
                raise Broken(f"{name} {position}: {short(a)} instead of {short(b)}")
            continue
        if (a[1] is None) != (b[1] is None):
            raise Broken(f"{name} {position} is masked in one of the two")
        wrong = mask_difference(a[1], b[1]) if a[1] is not None else None
        if not wrong and (a[0].dtype is not b[0].dtype or a[0].shape != b[0].shape):
            wrong = f"{a[0].dtype} {tuple(a[0].shape)} instead of {b[0].dtype} {tuple(b[0].shape)}"
        if not wrong and not trial.sample.valueless:
            magnitude = max(trial.magnitude, greatest)
            wrong = difference(a[0], b[0], a[1], magnitude=magnitude, coarsest=trial.rounding)
        if wrong:
            raise Broken(f"{name} {position}: {wrong}")


def _nothing(gradient: Any) -> bool:
    """Whether a gradient is none: not there, zero, or of a tensor of which nothing is valid."""
    if not isinstance(gradient, tuple):
        return gradient is None
    valid = gradient[0] if gradient[1] is None else gradient[0][gradient[1]]
    return not valid.any()
