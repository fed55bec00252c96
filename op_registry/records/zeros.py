"""Remember which tensors are zero where a mask says invalid, so that nobody fills them with zeros again.

A fact belongs to a tensor object and its version, like the values cached with masks: any write that torch knows of ends
it. We keep facts beside the tensors, not on them, because users get the gradients. Inside `zeros_verified`, in which
conformance and the tests run, each use of a fact checks it.
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
    """A tensor was zero where a mask says invalid, at these versions of both, while nothing else held its memory."""

    __slots__ = ("exposures", "tensor", "validity", "validity_version", "version")

    def __init__(self, tensor: weakref.ref[Tensor], version: int, validity: Tensor) -> None:
        self.tensor, self.version, self.exposures = tensor, version, _exposures
        self.validity, self.validity_version = validity, validity._version


# Facts by the tensor's id; callers can look here whether a tensor has any.
known_tensors: dict[int, _Fact] = {}
_exposures = 0
_verified = False


@contextlib.contextmanager
def zeros_verified() -> Iterator[None]:
    """Inside, using a false fact raises AssertionError: for tests, because the check reads the data."""
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
    """Record the same fact for `target`, which is zero wherever `source` is.

    validity   the validity of `target`
    of_source  the validity of `source` if it differs: `validity` is a view of it, as `target` is of `source`
    """
    if validity is not None and known_zero(source, validity if of_source is None else of_source):
        remember_zero(target, validity)


def memory_exposed() -> None:
    """Forget every fact: other code (NumPy, processes) now holds data, and may write to it without torch's knowledge.

    Later facts concern other memory, because they begin with a fill or derive from a fact that holds.
    """
    global _exposures
    _exposures += 1


def known_zero(data: Tensor, validity: Tensor | None) -> bool:
    """Whether we know that `data` is zero where `validity` says invalid; True if all are valid."""
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
    if _verified and not data.is_meta:  # meta tensors have no values
        assert not bool(torch.where(as_bool(validity), 0, data).any()), "not zero where it is invalid"
    return True
