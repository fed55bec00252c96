"""P4: semantics do not depend on storage; P3 and P5 on every storage."""

from __future__ import annotations

from typing import Any

from op_registry.conformance.compare import difference, mask_difference, short
from op_registry.conformance.laws import Broken, Densified, NotAsked, Trial, outcome_with_gradients
from op_registry.errors import MaskedSemanticsError


def layouts_agree(trial: Trial, storage: str) -> None:
    """Results and gradients stored otherwise are those of dense storage, with NaN wherever something invalid lies."""
    stored, dense = trial.wrapped(storage=storage)[2], trial.wrapped()[2]
    if all(type(a) is type(b) for a, b in zip(stored, dense, strict=True)):
        raise NotAsked(f"no tensor that can be stored as {storage}")
    base = outcome_with_gradients(trial, None)
    trial.subject.densified()
    again = outcome_with_gradients(trial, "nan", storage)
    densified = trial.subject.densified()
    if isinstance(base, Exception):
        if isinstance(base, MaskedSemanticsError) != isinstance(again, MaskedSemanticsError) or not isinstance(
            again, Exception
        ):
            raise Broken(f"stored as {storage}: {_told(again)}, dense: {_told(base)}")
        raise NotAsked("refused or wrong on dense storage too")
    if isinstance(again, Exception):
        raise again
    for what, mine, theirs in (("result", again[0], base[0]), ("gradient", again[1], base[1])):
        _same_to_rounding(f"stored as {storage}: {what}", mine, theirs, trial)
    if densified:
        raise Densified(densified[0])


def _told(outcome: Any) -> str:
    return f"{type(outcome).__name__}: {str(outcome)[:160]}" if isinstance(outcome, Exception) else "a result"


def _same_to_rounding(name: str, mine: list[Any], theirs: list[Any], trial: Trial) -> None:
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
        if not wrong and not trial.sample.valueless:
            wrong = difference(a[0], b[0], a[1], magnitude=trial.magnitude, coarsest=trial.rounding)
        if wrong:
            raise Broken(f"{name} {position}: {wrong}")


def _nothing(gradient: Any) -> bool:
    """Whether a gradient is none: not there, or of a tensor of which nothing is valid."""
    return gradient is None or (isinstance(gradient, tuple) and gradient[1] is not None and not gradient[1].any())
