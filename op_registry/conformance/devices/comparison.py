"""Every entry of torch's operator database on another device: values, masks and gradients are those of the CPU.

We can compare an entry if the subject runs it on the CPU and plain torch runs it on the device. On ``meta``, which has
no values, we compare shapes, dtypes, shapes of masks and devices. A call that is refused on the CPU must be refused on
the device, and we compare it again with every element valid.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from op_registry.conformance.compare import difference, mask_difference
from op_registry.conformance.devices.calls import Brought, Call, What, operands
from op_registry.conformance.sample import Operator, Sample, chosen
from op_registry.conformance.subject import Subject
from op_registry.errors import MaskedSemanticsError

# How many samples of an entry are tried until one can be compared.
MOST_TRIED = 4
# Entries whose backward on plain tensors crashes the process in the device's thread.
PLAIN_ABORTS = ("fft_hfft",)

Status = Literal["equal", "refused", "different", "not comparable"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """How an entry's results, or its gradients, compare with the CPU's."""

    entry: str
    what: What
    # "refused": on the CPU too. "not comparable": `reason` says why.
    status: Status
    reason: str = ""
    sample: int | None = None


def findings(
    operator: Operator,
    device: torch.device,
    subject: Subject,
    sample: int | None = None,
    comparison: type[Comparison] | None = None,
) -> list[Finding]:
    """Compare an entry on a device with the CPU: the first sample that can be compared, or the one with this number.

    comparison  calls a sample on both
    """
    compare = comparison or Comparison
    subject.prepare(device)
    samples = operator.samples(operator.preferred_dtype) if operator.dtypes else []
    if sample is not None:
        tried = [s for s in samples if s.number == sample]
    else:
        tried = chosen([s for s in samples if any(t.numel() > 1 for t in s.tensors)], MOST_TRIED)
    found = [Finding(operator.name, "results", "not comparable", "no tensor of two elements to mask")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position, candidate in enumerate(tried):
            latest = compare(operator.name, candidate, device, subject, "half").findings()
            if latest[0].status == "refused":
                latest += compare(operator.name, candidate, device, subject, _all_valid(device)).findings()
            comparable = all(f.status != "not comparable" for f in latest)
            if comparable or not position:
                found = latest
            if comparable:
                break
    return found


def _all_valid(device: torch.device) -> str:
    """The kind of mask under which no call is refused; not a stored mask on meta, where nobody can read it."""
    return "unstored" if device.type in ("meta", "jax") else "stored"


class Comparison:
    """One sample on the CPU and on a device, under masks of one kind."""

    def __init__(self, entry: str, sample: Sample, device: torch.device, subject: Subject, kind: str) -> None:
        self.entry, self.sample, self.device, self.subject, self.kind = entry, sample, device, subject, kind
        # Each is computed once, at its first use: a graph can be differentiated only once.
        self._call = functools.cache(self._call_on)
        self._outcome = functools.cache(self._outcome_on)

    def _call_on(self, device: torch.device, masked: bool) -> Call:
        laid = operands(self.sample, self.kind if masked else None)
        return Call(self.sample, self.subject, [operand.to(device) for operand in laid])

    def findings(self) -> list[Finding]:
        results = self._found("results")
        if results.status != "equal" or not self.sample.differentiable or self.entry in PLAIN_ABORTS:
            return [results]
        return [results, self._found("gradients")]

    def _found(self, what: What) -> Finding:
        status, reason = self._judged(what)
        return Finding(self.entry, what, status, reason, self.sample.number)

    def _judged(self, what: What) -> tuple[Status, str]:
        try:
            theirs = self._outcome(what, CPU, True)
        except MaskedSemanticsError as error:
            return self._refused(what, error)
        except Exception as error:
            return "not comparable", f"the CPU raises: {said(error)}"
        if what == "gradients" and all(gradient is None for gradient in theirs):
            return "not comparable", "no gradient"
        return self._compared(what, theirs)

    def _compared(self, what: What, theirs: list[Any]) -> tuple[Status, str]:
        """Compare the call on the device with `theirs`, the CPU's results."""
        why = self._plain_error(what)
        if why is not None:
            return "not comparable", why
        plain = self._outcome(what, self.device, False)
        try:
            mine = self._outcome(what, self.device, True)
        except Exception as error:
            return "different", f"raises {said(error)}"
        wrong = difference_of(mine, theirs, plain, self._same)
        if wrong is None:
            return "equal", ""
        if self._differs_for_plain_tensors(what, plain):
            return "not comparable", f"plain torch gives something else on {self.device.type}"
        return "different", wrong

    def _outcome_on(self, what: What, device: torch.device, masked: bool) -> list[Any]:
        found = self._call(device, masked).observed(what)
        return [Brought.of(*part) if isinstance(part, tuple) else part for part in found]

    def _plain_error(self, what: What) -> str | None:
        """Why plain torch does not run the call on the device; None if it does."""
        try:
            self._outcome(what, self.device, False)
        except Exception as error:
            return f"plain torch on {self.device.type} raises: {said(error)}"
        return None

    def of_plain_tensors(self) -> str | None:
        """Why a call cannot be compared with the CPU, plain tensors included; None if it can."""
        for what in ("results", "gradients") if self.sample.differentiable else ("results",):
            why = self._plain_error(what)
            if why is None and self._differs_for_plain_tensors(what, self._outcome(what, self.device, False)):
                why = f"plain torch gives something else on {self.device.type}"
            if why is not None:
                return why
        return None

    def _refused(self, what: What, on_cpu: MaskedSemanticsError) -> tuple[Status, str]:
        """A call that is refused on the CPU must be refused on the device too, with an error that names it."""
        try:
            self._outcome(what, self.device, True)
        except MaskedSemanticsError as error:
            return "refused", said(error)
        except Exception as error:
            why = self._plain_error(what)
            if why is not None:
                return "not comparable", why
            return "different", f"raises {said(error)}; on the CPU {said(on_cpu)}"
        return "different", f"not refused; on the CPU {said(on_cpu)}"

    def _differs_for_plain_tensors(self, what: What, plain: list[Any]) -> bool:
        """Whether plain torch itself gives other values there, as random operators do with another generator."""
        if self.device.type == "meta":
            return False
        return difference_of(plain, self._outcome(what, CPU, False), plain, self._same) is not None

    def _same(self, mine: Brought, theirs: Brought) -> str | None:
        """How two tensors differ; on meta, in everything but values."""
        if self.device.type == "meta":
            return _difference_of_meta(mine, theirs)
        wrong = mask_difference(mine.mask, theirs.mask) if mine.mask is not None and theirs.mask is not None else None
        if wrong or self.sample.valueless:
            return wrong
        return difference(mine.data, theirs.data, mine.mask)


def _difference_of_meta(mine: Brought, theirs: Brought) -> str | None:
    pairs = [("", mine.data, theirs.data)]
    if mine.mask is not None and theirs.mask is not None:
        pairs.append(("the mask is ", mine.mask, theirs.mask))
    for prefix, a, b in pairs:
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{prefix}{a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
    return None


def difference_of(
    mine: Sequence[Any], theirs: Sequence[Any], plain: Sequence[Any], same: Callable[[Brought, Brought], str | None]
) -> str | None:
    """How results on the device differ from the CPU's, or in their device from plain torch's; or None."""
    if not len(mine) == len(theirs) == len(plain):
        return f"{len(mine)} results instead of {len(theirs)} (plain torch: {len(plain)})"
    for position, (a, b, p) in enumerate(zip(mine, theirs, plain, strict=True)):
        wrong = _difference_of_leaves(a, b, p, same)
        if wrong:
            return f"{position}: {wrong}"
    return None


def _difference_of_leaves(a: Any, b: Any, p: Any, same: Callable[[Brought, Brought], str | None]) -> str | None:
    if not isinstance(a, Brought) or not isinstance(b, Brought):
        return None if a == b or (a != a and b != b) else f"{a!r} instead of {b!r}"
    if isinstance(p, Brought) and a.device != p.device:
        return f"on {a.device} instead of {p.device}"
    if (a.mask is None) != (b.mask is None):
        return "plain, on the CPU masked" if a.mask is None else "masked, on the CPU plain"
    if a.mask is not None and a.mask_device != a.device:
        return f"the mask is on {a.mask_device}, the data on {a.device}"
    return same(a, b)


def said(error: Exception) -> str:
    """An error in a line, with the last frame of these packages in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/conformance/" not in f.filename]
    own = [f for f in frames if any(f"/{package}/" in f.filename for package in ("masked_dispatch", "op_registry"))]
    where = f" ({'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
