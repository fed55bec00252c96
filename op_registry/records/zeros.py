"""Which tensors are known to be zero where a mask says invalid, so that they need not be filled with zeros again.

A fact of a tensor object and its version, like the ones that are remembered of masks: any write that torch knows of
ends it. Kept beside the tensors, not on them, because gradients reach their users. Inside `zeros_verified`, as
conformance and the tests run, each fact is checked where it is used.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced, recording
from op_registry.records.validity import as_bool


class _Fact:
    """That a tensor was zero where a mask says invalid, at these versions of both, when nobody else had its memory."""

    __slots__ = ("exposures", "tensor", "validity", "validity_version", "version")

    def __init__(self, tensor: weakref.ref[Tensor], version: int, validity: Tensor) -> None:
        self.tensor, self.version, self.exposures = tensor, version, _exposures
        self.validity, self.validity_version = validity, validity._version


# By the id of the tensor; for callers that ask for a fact only where there is one.
known_tensors: dict[int, _Fact] = {}
_exposures = 0
_verified = False


@contextlib.contextmanager
def zeros_verified() -> Iterator[None]:
    """Inside, a fact that is used and not true raises AssertionError: for tests, because it reads the data."""
    global _verified
    before, _verified = _verified, True
    try:
        yield
    finally:
        _verified = before


def remember_zero(data: Tensor, validity: Tensor) -> None:
    """Record that `data` is zero where `validity` says invalid."""
    if being_traced(data) or being_traced(validity) or data.is_inference() or validity.is_inference():
        return
    key = id(data)
    known_tensors[key] = _Fact(weakref.ref(data, lambda _: known_tensors.pop(key, None)), data._version, validity)


def hand_on(source: Tensor, target: Tensor, validity: Tensor | None, of_source: Tensor | None = None) -> None:
    """Record the same of `target`, which is zero wherever `source` is.

    validity   of `target`
    of_source  where `source` has another: that of which `validity` is a view, as `target` is of `source`
    """
    if validity is not None and known_zero(source, validity if of_source is None else of_source):
        remember_zero(target, validity)


def memory_exposed() -> None:
    """Data is handed out, to be written to without torch's knowledge (NumPy, processes): every fact so far ends.

    Later facts are about other memory, because they begin with a fill, or are handed on from one that holds.
    """
    global _exposures
    _exposures += 1


def known_zero(data: Tensor, validity: Tensor | None) -> bool:
    """Whether `data` is known to be zero where `validity` says invalid; True where all is valid."""
    if validity is None or being_traced(data):
        return validity is None
    fact = known_tensors.get(id(data))
    if (
        fact is None
        or fact.validity is not validity
        or fact.tensor() is not data
        or fact.version != data._version
        or fact.exposures != _exposures
        or fact.validity_version != validity._version
        or recording()
    ):
        return False
    if _verified and not data.is_meta:  # which has no values
        assert not bool(torch.where(as_bool(validity), 0, data).any()), "not zero where it is invalid"
    return True
