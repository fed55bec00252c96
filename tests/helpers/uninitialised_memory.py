"""Uninitialised memory with a chosen content, so that a result that depends on it shows; and which calls do.

glibc writes a byte into whatever it allocates if ``mallopt(M_PERTURB, …)`` says so, and torch's CPU memory comes from
there: that of Python functions, of composite operators and of kernels alike. A dispatch mode would see less, and change
what runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from op_registry.conformance import find_subject
from op_registry.conformance.compare import BITS, Outcome, first_difference
from op_registry.conformance.law import Trial, outcome_with_gradients
from op_registry.conformance.laws.hidden import bits_differ, what_happened
from op_registry.conformance.masks import masking
from op_registry.conformance.python_level import Result, call_with, run
from op_registry.conformance.sample import Operator, Sample
from op_registry.conformance.trials import Settings, describe, trials_of
from op_registry.report import python_level
from repository import ROOT

SUBJECT = find_subject("masked_dispatch.conformance_subject:eager")
ALLOCATING = ROOT / "tests/conformance/allocating_composites.expect"

M_PERTURB = -6  # of <malloc.h>

# A byte of which every float is NaN and every integer -1; and one of tiny floats and large integers.
POISONS = (0xFF, 0x01)
REPETITIONS = 8  # under one poison, of a call whose results differ

T = TypeVar("T")


@contextlib.contextmanager
def uninitialised_bytes(byte: int) -> Iterator[None]:
    """Let each byte of freshly allocated memory be `byte`, or its complement where a small piece was just freed."""
    # glibc writes the complement of the number's last byte, and nothing at all where the number is 0.
    _mallopt(0x100 | (byte ^ 0xFF))
    # Pieces that were freed before would be handed out again as they are. Whatever does not fit puts them in order,
    # and then they are written to.
    torch.empty(2**17, dtype=torch.uint8)
    try:
        yield
    finally:
        _mallopt(0)


def _mallopt(value: int) -> None:
    if ctypes.CDLL(None).mallopt(M_PERTURB, value) != 1:
        raise RuntimeError(f"mallopt(M_PERTURB, {value:#x}) failed")


def can_be_poisoned() -> bool:
    """Whether torch's uninitialised memory gets a chosen content on this machine."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        return False
    for byte in POISONS:
        with uninitialised_bytes(byte):
            if not all(has_content(torch.empty(n, dtype=torch.uint8), byte) for n in (1, 64, 4096, 2**20)):
                return False
    return True


def has_content(tensor: Tensor, byte: int) -> bool:
    """Whether the memory of a contiguous tensor has the content that :func:`uninitialised_bytes` gives it."""
    content = tensor.reshape(-1).view(torch.uint8)
    return bool((content == byte).all()) or bool((content == byte ^ 0xFF).all())


def difference(run: Callable[[], T], compare: Callable[[T, T], str | None]) -> str | None:
    """How what `run` gives depends on the content of uninitialised memory, or None if it does not."""
    results = []
    for byte in POISONS:
        with uninitialised_bytes(byte):
            results.append(run())
    found = compare(*results)
    if found is None:
        return None
    # Some LAPACK routines round by the address of their operands: what varies under one poison says nothing.
    with uninitialised_bytes(POISONS[0]):
        runs = [run() for _ in range(REPETITIONS)]
    return None if any(compare(runs[0], other) for other in runs[1:]) else found


def difference_of_trials(trial: Trial, storage: str | None = None, explicit_invalid: bool = False) -> str | None:
    """How results, masks, gradients or errors of a trial depend on uninitialised memory, or None."""
    return difference(
        lambda: outcome_with_gradients(trial, None, storage, explicit_invalid),
        lambda first, second: _outcomes_differ(trial, first, second),
    )


def _outcomes_differ(trial: Trial, first: Outcome | Exception, second: Outcome | Exception) -> str | None:
    if isinstance(first, Exception) or isinstance(second, Exception):
        same = type(first) is type(second)
        return None if same else f"{what_happened(first)}, and with other memory {what_happened(second)}"
    wrong = bits_differ(second, first, trial)
    return f"with other memory: {wrong}" if wrong else None


def results_differ(first: Result, second: Result) -> str | None:
    """How two results of a function that torch writes in Python differ in mask, in a valid value or in an error."""
    if type(first.error) is not type(second.error):
        return f"{first.error or 'a result'}, and with other memory {second.error or 'another one'}"
    return first_difference("result", first.leaves, second.leaves, BITS)


# Calls that depend on it ----------------------------------------------------------------------------------------------


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
