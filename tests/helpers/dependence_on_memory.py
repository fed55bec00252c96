"""Which calls of an operator or a function depend on what uninitialised memory happens to contain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_registry.conformance import find_subject
from op_registry.conformance.masks import masking
from op_registry.conformance.python_level import call_with, run
from op_registry.conformance.sample import Operator, Sample
from op_registry.conformance.trials import Settings, describe, trials_of
from op_registry.report import python_level
from poisoned_memory import difference, difference_of_trials, results_differ
from repository import ROOT

SUBJECT = find_subject("masked_dispatch.conformance_subject:eager")
ALLOCATING = ROOT / "tests/conformance/allocating_composites.expect"


def dependent_trials(
    operator: Operator, settings: Settings, storage: str | None = None, explicit_invalid: bool = False
) -> list[str]:
    """The trials of an operator whose outcome depends on uninitialised memory, and how."""
    found = []
    for description, trial in trials_of(operator, "P3", SUBJECT, settings, storage is not None):
        if trial.plain_error is None:
            why = difference_of_trials(trial, storage, explicit_invalid)
            found += [f"{operator.name} {description} {storage or ''}: {why}"] if why else []
    return found


def dependent_calls(name: str, kinds: Sequence[str], most: int | None = None) -> list[str]:
    """The calls of a function of torch that depend on uninitialised memory, and how."""
    if python_level.reason_not_called(name):
        return []
    runs = (s for s in python_level.samples_of(name) if s.tensors and run(SUBJECT, call_with(s, copied)).error is None)
    found = []
    for sample, kind in itertools.product(itertools.islice(runs, most), kinds):
        why = difference(lambda s=sample, k=kind: run(SUBJECT, masked_call(s, k)), results_differ)
        found += [f"{name} {describe(sample, kind)}: {why}"] if why else []
    return found


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def masked_call(sample: Sample, kind: str) -> Callable[[], object]:
    """The call with its tensors of numbers under masks of that kind, and NaN there; other tensors stay plain."""
    masks = masking(kind, sample.tensors)
    assert masks is not None
    by_id = {id(t): m for t, m in zip(sample.tensors, masks.full(sample.tensors), strict=True)}

    def masked(tensor: Tensor) -> Tensor:
        mask = by_id[id(tensor)]
        if mask is None or not tensor.is_floating_point():
            return copied(tensor)
        return SUBJECT.wrap(torch.where(mask, tensor, torch.nan), mask)

    return call_with(sample, masked)
