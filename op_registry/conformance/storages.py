"""P4: semantics don't depend on storage; P3 and P5 on every storage.

We compare every trial with the same call on dense storage. P4 stores the valid elements, with NaN in the invalid
elements of stored blocks or dense dimensions. P3 also stores invalid elements explicitly, with different fills. P5
compares gradients up to second order, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import difference, mask_difference, short
from op_registry.conformance.gradients import derivatives, derivatives_or_refusal
from op_registry.conformance.laws import Outcome, fills_for, outcome_with_gradients, same_bits, what_happened
from op_registry.conformance.likely_causes import own_lowerings
from op_registry.conformance.plain_torch import one_line
from op_registry.conformance.trial import Broken, Densified, NotAsked, Trial, storage_of
from op_registry.errors import MaskedSemanticsError


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


def non_interference(trial: Trial, storage: str) -> None:
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


def gradients_agree(trial: Trial, storage: str) -> None:
    """P5: gradients of first and second order are those of dense storage, which P5 compares with the oracle."""
    if trial.derivative_order == 0:
        raise NotAsked(f"no derivative: {plain_torch.derivative(trial.sample, trial.seed).why}")
    check_storage_applies(trial, storage)
    dense = trial.once("derivatives on dense storage", derivatives_or_refusal)
    stored = derivatives(trial, storage)
    for order, mine, theirs in zip(("gradient", "second-order gradient"), stored, dense, strict=True):
        if mine is not None and theirs is not None:
            _same_to_rounding(f"stored as {storage}: {order}", mine, theirs, trial)
        elif not all(_is_zero(gradient) for gradient in mine or theirs or ()):
            raise Broken(f"stored as {storage}: only one of this storage and dense storage has a {order}")


def check_storage_applies(trial: Trial, storage: str) -> None:
    """NotAsked if no tensor fits the storage or, for "csr_first" and its like, only one (then "csr" tests the same)."""
    layout, only_first = storage_of(storage)
    if trial.once(f"tensors stored as {layout}", lambda trial: _tensors_stored(trial, layout)) < 1 + only_first:
        raise NotAsked(f"no tensor that can be stored as {storage}")


def _tensors_stored(trial: Trial, layout: str) -> int:
    """How many of the operands the layout can store."""
    dense = trial.once("dense operands", lambda trial: [type(value) for value in trial.wrapped()[2]])
    return sum(type(a) is not b for a, b in zip(trial.wrapped(storage=layout)[2], dense, strict=True))


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
    _same_to_rounding(f"{name}: result", stored[0], dense[0], trial)
    # Gradients of one call share intermediate results, so rounding errors scale with the greatest of them.
    _same_to_rounding(f"{name}: gradient", stored[1], dense[1], trial, greatest=_greatest(dense[1]))


def _result_or_error(outcome: Outcome | Exception) -> str:
    return one_line(outcome) if isinstance(outcome, Exception) else "a result"


def _greatest(values: Sequence[Any]) -> float:
    """The largest finite magnitude among the valid elements of observed values."""
    magnitudes = [0.0]
    for value in values:
        if isinstance(value, tuple) and (value[0].is_floating_point() or value[0].is_complex()):
            valid = value[0] if value[1] is None else value[0][value[1]]
            finite = valid.abs()[valid.isfinite()]
            magnitudes += [float(finite.max())] if finite.numel() else []
    return max(magnitudes)


def _same_to_rounding(
    name: str, mine: Sequence[Any], theirs: Sequence[Any], trial: Trial, greatest: float = 0.0
) -> None:
    if len(mine) != len(theirs):
        raise Broken(f"{name}: {len(mine)} instead of {len(theirs)}")
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not isinstance(a, tuple) or not isinstance(b, tuple):
            if not (_is_zero(a) and _is_zero(b)) and a is not b and a != b and not (a != a and b != b):
                raise Broken(f"{name} {position}: {short(a)} instead of {short(b)}")
            continue
        if (a[1] is None) != (b[1] is None):
            raise Broken(f"{name} {position} is masked on only one of the storages")
        wrong = mask_difference(a[1], b[1]) if a[1] is not None else None
        if not wrong and (a[0].dtype is not b[0].dtype or a[0].shape != b[0].shape):
            wrong = f"{a[0].dtype} {tuple(a[0].shape)} instead of {b[0].dtype} {tuple(b[0].shape)}"
        if not wrong and not trial.sample.valueless:
            magnitude = max(trial.magnitude, greatest)
            wrong = difference(a[0], b[0], a[1], magnitude=magnitude, coarsest=trial.rounding)
        if wrong:
            raise Broken(f"{name} {position}: {wrong}")


def _is_zero(gradient: object) -> bool:
    """Whether a gradient is None, or zero wherever it is valid."""
    if not isinstance(gradient, tuple):
        return gradient is None
    valid = gradient[0] if gradient[1] is None else gradient[0][gradient[1]]
    return not valid.any()
