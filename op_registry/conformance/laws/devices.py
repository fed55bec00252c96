"""P7 on other devices: every operator gives the same results and gradients as on the CPU, and keeps the laws."""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from op_registry.conformance.compare import Tolerance, first_difference
from op_registry.conformance.law import Case, Cases, Law, Status
from op_registry.conformance.masks import masking, refilled
from op_registry.conformance.reference_device import compilations
from op_registry.conformance.sample import Operator, Sample, chosen, start_random_numbers, tree_leaves
from op_registry.conformance.subject import Observed, Subject
from op_registry.errors import MaskedSemanticsError

if TYPE_CHECKING:
    from op_registry.conformance.trials import Settings

What = Literal["results", "gradients"]


class Leaf(NamedTuple):
    """A leaf of a result, brought to the CPU, and the devices of its data and mask; none of a Python value."""

    value: Any
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Any) -> Leaf:
        if not isinstance(found, tuple):
            return cls(found)
        data, mask = found
        tensors = [data] if mask is None else [data, mask]
        return cls((_on_cpu(data), None if mask is None else _on_cpu(mask)), tuple(t.device.type for t in tensors))


def _on_cpu(tensor: Any) -> Tensor:
    if tensor.device.type == "jax":  # asked first: torchax's tensors have the device meta underneath
        return tensor._env.j2t_copy(tensor.jax())
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def _without_values(leaf: Leaf) -> Any:
    """A leaf to be compared in everything but the values of its tensors."""
    if not isinstance(leaf.value, tuple):
        return leaf.value
    return tuple(None if t is None else torch.zeros(t.shape, dtype=t.dtype) for t in leaf.value)


@dataclass(frozen=True)
class Operand:
    """The data of one of the sample's tensors, and its mask; None if all elements are valid."""

    data: Tensor
    mask: Tensor | None
    masked: bool

    def to(self, device: torch.device) -> Operand:
        return Operand(self.data.to(device), None if self.mask is None else self.mask.to(device), self.masked)


def operands(sample: Sample, kind: str | None, seed: int = 0) -> list[Operand]:
    """The sample's tensors under masks of a kind; with `kind` None, all are plain."""
    copies = [tensor.detach().clone() for tensor in sample.tensors]
    laid = None if kind is None else masking(kind, sample.tensors, seed)
    if laid is None:
        return [Operand(data, None, False) for data in copies]
    masks = [mask if isinstance(mask, Tensor) else None for mask in laid.masks]
    return [Operand(data, mask, True) for data, mask in zip(copies, masks, strict=True)]


class Call:
    """A sample called on operands, which lie on one device."""

    def __init__(self, sample: Sample, subject: Subject, operands: Sequence[Operand]) -> None:
        self.subject = subject
        self.made: list[Any] = []

        def made(tensor: Tensor) -> Any:
            position = len(self.made)
            operand, wanted = operands[position], _differentiated(sample, position, tensor)
            if operand.masked:
                self.made.append(subject.wrap(operand.data, operand.mask, wanted))
            else:
                self.made.append(operand.data.requires_grad_(wanted))
            return self.made[-1]

        args, kwargs = sample.with_tensors(made)
        start_random_numbers(0)
        self.result = subject.call(sample.fn, *args, **kwargs)
        self.differentiated = sample.differentiable_part(self.result)

    def observed(self, what: What) -> list[Any]:
        """The data and mask of each tensor among the results, or the gradients; other values as they are."""
        leaves = self._results() if what == "results" else self._gradients()
        return [self.subject.observe(leaf) if self.subject.is_value(leaf) else leaf for leaf in leaves]

    def _results(self) -> list[Any]:
        """Every leaf of the result."""
        return tree_leaves(self.result, is_leaf=self.subject.is_value)

    def _gradients(self) -> list[Any]:
        """The gradients of the sum of all squares.

        The sum uses each result twice, so that the autograd engine adds gradients.
        """
        squares = [
            (leaf * leaf.conj()).real.sum() if leaf.is_complex() else (leaf * leaf).sum()
            for leaf in tree_leaves(self.differentiated, is_leaf=self.subject.is_value)
            if self.subject.is_value(leaf) and self.subject.requires_grad(leaf)
        ]
        inputs = [value for value in self.made if self.subject.requires_grad(value)]
        if not squares or not inputs:
            return []
        ones = [torch.ones_like(square) for square in squares]
        return list(torch.autograd.grad(squares, inputs, ones, allow_unused=True))


def _differentiated(sample: Sample, position: int, tensor: Tensor) -> bool:
    """Whether to differentiate by a tensor of the sample."""
    known = sample.variables is None or position in sample.variables
    return sample.differentiable and known and (tensor.is_floating_point() or tensor.is_complex())


# ----------------------------------------------------------------------------------------------------------------------
# Every entry of torch's operator database on another device: values, masks and gradients are those of the CPU.

# We can compare an entry if the subject runs it on the CPU and plain torch runs it on the device. On ``meta``, which
# has no values, we compare shapes, dtypes, kinds and devices. A call that is refused on the CPU must be refused on the
# device, and we compare it again with every element valid.

# How many samples of an entry are tried until one can be compared.
MOST_TRIED = 4
# Entries whose backward on plain tensors crashes the process in the device's thread.
PLAIN_ABORTS = ("fft_hfft",)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """How an entry's results, or its gradients, compare with the CPU's, and the sample that was called.

    "refused rightly": on the CPU too. "not asked": they cannot be compared; `reason` says why.
    """

    what: What
    status: Status
    reason: str = ""
    sample: int | None = None


@functools.lru_cache(maxsize=1)  # the law of results and that of gradients ask for the same
def findings(operator: Operator, device: torch.device, subject: Subject, sample: int | None = None) -> list[Finding]:
    """Compare an entry on a device with the CPU: the first sample that can be compared, or the one with this number."""
    compare = OnXla if device.type == "jax" else Comparison
    samples = operator.samples(operator.preferred_dtype) if operator.dtypes else []
    if sample is not None:
        tried = [s for s in samples if s.number == sample]
    else:
        tried = chosen([s for s in samples if any(t.numel() > 1 for t in s.tensors)], MOST_TRIED)
    found = [Finding("results", "not asked", "no tensor of two elements to mask")]
    for position, candidate in enumerate(tried):
        latest = compare(operator.name, candidate, device, subject, "half").findings()
        if latest[0].status == "refused rightly":
            latest += compare(operator.name, candidate, device, subject, _all_valid(device)).findings()
        comparable = all(f.status != "not asked" for f in latest)
        if comparable or not position:
            found = latest
        if comparable:
            break
    return found


def _all_valid(device: torch.device) -> str:
    """The kind of mask under which no call is refused; not a stored mask on meta, where nobody can read it."""
    return "unstored" if device.type in ("meta", "jax") else "stored"


def cases(what: What) -> Cases:
    """The comparisons of an operator's results, or of its gradients, as cases."""

    def of_operator(operator: Operator, subject: Subject, settings: Settings) -> Iterator[Case]:
        if isinstance(subject, _OnDevice):
            for found in findings(operator, subject.device, subject.subject, settings.sample):
                if found.what == what:
                    tried, repeat = "no sample", ""
                    if found.sample is not None:
                        dtype = str(operator.preferred_dtype).removeprefix("torch.")
                        tried, repeat = f"{dtype} sample {found.sample}", f" --sample {found.sample}"
                    description = f"{tried} {what} {subject.device.type}"
                    yield Case(description, repeat=repeat, known=(found.status, found.reason))

    return of_operator


def _not_comparable(operator: Operator, seed: int, silences: Mapping[str, int] | None) -> str | None:
    return next(iter(silences or ()), "there is no gradient, or no device (--device)")


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
        if results.status != "pass" or not self.sample.differentiable or self.entry in PLAIN_ABORTS:
            return [results]
        return [results, self._found("gradients")]

    def _found(self, what: What) -> Finding:
        status, reason = self._judged(what)
        return Finding(what, status, reason, self.sample.number)

    def _judged(self, what: What) -> tuple[Status, str]:
        try:
            theirs = self._outcome(what, CPU, True)
        except MaskedSemanticsError as error:
            return self._refused(what, error)
        except Exception as error:
            return "not asked", f"the CPU raises: {said(error)}"
        if what == "gradients" and all(leaf.value is None for leaf in theirs):
            return "not asked", "no gradient"
        return self._compared(what, theirs)

    def _compared(self, what: What, theirs: list[Any]) -> tuple[Status, str]:
        """Compare the call on the device with `theirs`, the CPU's results."""
        why = self._plain_error(what)
        if why is not None:
            return "not asked", why
        plain = self._outcome(what, self.device, False)
        try:
            mine = self._outcome(what, self.device, True)
        except Exception as error:
            return "broken", f"raises {said(error)}"
        wrong = self._difference(mine, theirs, plain)
        if wrong is None:
            return "pass", ""
        if self._differs_for_plain_tensors(what, plain):
            return "not asked", f"plain torch gives something else on {self.device.type}"
        return "broken", wrong

    def _outcome_on(self, what: What, device: torch.device, masked: bool) -> list[Leaf]:
        return [Leaf.of(found) for found in self._call(device, masked).observed(what)]

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
            return "refused rightly", said(error)
        except Exception as error:
            why = self._plain_error(what)
            if why is not None:
                return "not asked", why
            return "broken", f"raises {said(error)}; on the CPU {said(on_cpu)}"
        return "broken", f"not refused; on the CPU {said(on_cpu)}"

    def _differs_for_plain_tensors(self, what: What, plain: list[Any]) -> bool:
        """Whether plain torch itself gives other values there, as random operators do with another generator."""
        if self.device.type == "meta":
            return False
        return self._difference(plain, self._outcome(what, CPU, False), plain) is not None

    def _difference(self, mine: Sequence[Leaf], theirs: Sequence[Leaf], plain: Sequence[Leaf]) -> str | None:
        """How results on the device differ from the CPU's, or in their device from plain torch's; or None."""
        if self.device.type == "meta":
            got, want = (list(map(_without_values, leaves)) for leaves in (mine, theirs))
        else:
            got, want = ([leaf.value for leaf in leaves] for leaves in (mine, theirs))
        wrong = first_difference("leaf", got, want, Tolerance(values=not self.sample.valueless))
        for position, (own, expected) in enumerate(zip(mine, plain, strict=False)):
            if wrong is None and expected.devices and {*own.devices} - {*expected.devices}:
                wrong = f"leaf {position}: on {' and '.join(own.devices)} instead of {expected.devices[0]}"
        return wrong


def said(error: Exception) -> str:
    """An error in a line, with the last frame of these packages in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/conformance/" not in f.filename]
    own = [f for f in frames if any(f"/{package}/" in f.filename for package in ("masked_dispatch", "op_registry"))]
    where = f" ({'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


# ----------------------------------------------------------------------------------------------------------------------
# A subject on another device: the laws run there, and compare what comes back with oracles on the CPU.


class _OnDevice(Subject):
    """What a subject does on a device: its tensors are put there when they are wrapped, and brought to the CPU when
    they are observed. Plain torch, with which P1 compares bit for bit, runs there too.
    """

    subject: Subject
    device: torch.device
    # torch's errors name devices, and some are raised on the CPU alone.
    own_errors = False

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def brought(self, value: Any) -> Any:
        return value.cpu() if isinstance(value, Tensor) else value

    def excuse(self, sample: Sample) -> str | None:
        return Comparison("", sample, self.device, self.subject, "half").of_plain_tensors()

    def wrap(self, data: Tensor, mask: Tensor | None, requires_grad: bool = False) -> Any:
        return super().wrap(self.placed(data), None if mask is None else self.placed(mask), requires_grad)

    def padded(self, data: Tensor, mask: Tensor | None, there: Tensor, *where: Any, **more: Any) -> Any:
        return super().padded(
            self.placed(data), None if mask is None else self.placed(mask), self.placed(there), *where, **more
        )

    def extent(self, value: Any) -> Tensor | None:
        return self.brought(super().extent(value))

    def observe(self, value: Any) -> Observed:
        data, mask = super().observe(value)
        return self.brought(data), self.brought(mask)

    def densified(self) -> list[str]:
        return self.subject.densified()

    def modes(self) -> dict[str, Subject]:
        return {name: on_device(mode, self.device) for name, mode in self.subject.modes().items()}


def on_device(subject: Subject, device: torch.device) -> Subject:
    """The same subject on a device."""
    subject.prepare(device)
    there: Any = copy.copy(subject)
    there.__class__ = type(f"{type(subject).__name__}OnDevice", (_OnDevice, type(subject)), {})
    there.subject, there.device, there.name = subject, device, f"{subject.name} on {device.type}"
    return there


# -------------------- calls on torchax tensors, compiled by XLA: one program for several masks, with garbage under them

# We call the same sample on the CPU, once for each mask. As a control, we call plain torch in the way rules do, by
# operators, which torch's autograd records. (torchax implements some of torch's functions itself, and autograd does not
# record those.)

# How many masks of a kind we use, one after the other.
MASKS = 3


class CompiledAgain(Exception):
    """XLA compiled more than one program for masks of one kind."""


def laid(sample: Sample, kind: str | None) -> list[list[Operand]]:
    """The operands under each mask of the kind, with garbage where they are invalid."""
    found = []
    for seed in range(MASKS):
        made = operands(sample, kind, seed)
        masks = [None if o.mask is None else o.mask.expand(o.data.shape) for o in made]
        found.append([replace(o, data=refilled(o.data, m, "nan")) for o, m in zip(made, masks, strict=True)])
    return found


class CallsOnCpu(list[Call]):
    """Calls under one mask after the other."""

    def observed(self, what: What) -> list[Any]:
        return [part for call in self for part in call.observed(what)]


class CompiledCalls:
    """The same with one compiled function; raises CompiledAgain if XLA compiles anything for another mask."""

    def __init__(self, sample: Sample, subject: Subject, kind: str | None) -> None:
        self.sample, self.subject, self.kind = sample, subject, kind

    def observed(self, what: What) -> list[Any]:
        import torchax
        import torchax.interop

        # What each part of the result is: of a tensor, whether it has a mask; another value, as it is.
        parts: list[Any] = []

        def function(data: Sequence[Tensor], masks: Sequence[Tensor | None]) -> list[Tensor]:
            masked = self.kind is not None
            made = [Operand(d, m, masked) for d, m in zip(data, masks, strict=True)]
            with contextlib.nullcontext() if masked else torch._C.DisableTorchFunction():
                observed = Call(self.sample, self.subject, made).observed(what)
            parts[:] = [_Pair(part[1] is not None) if isinstance(part, tuple) else part for part in observed]
            return [t for part in observed if isinstance(part, tuple) for t in part if t is not None]

        compiled = torchax.interop.jax_jit(function)
        found: list[Any] = []
        with torchax.default_env():
            calls = [[operand.to(torch.device("jax")) for operand in made] for made in laid(self.sample, self.kind)]
            for number, made in enumerate(calls):
                with compilations() as counted:
                    tensors = iter(compiled([o.data for o in made], [o.mask for o in made]))
                if counted.number != (number == 0):
                    raise CompiledAgain(f"{counted.number} compilations for mask number {number}")
                found.extend(part.filled(tensors) if isinstance(part, _Pair) else part for part in parts)
        return found


@dataclass(frozen=True)
class _Pair:
    """Stands for a tensor among the results, and says whether its mask follows its data."""

    masked: bool

    def filled(self, tensors: Iterator[Any]) -> tuple[Any, Any]:
        """The next tensors: data, and the mask or None."""
        return next(tensors), next(tensors) if self.masked else None


class OnXla(Comparison):
    """One sample on the CPU and compiled by XLA, under one mask after the other.

    Equal results count even if plain torch does not run there. If results differ, we ask whether plain torch runs, and
    whether torchax reports that it lacks a lowering for an operator, to decide whose fault it is.
    """

    def _call_on(self, device: torch.device, masked: bool) -> Any:
        kind = self.kind if masked else None
        if device.type == "cpu":
            return CallsOnCpu(Call(self.sample, self.subject, made) for made in laid(self.sample, kind))
        return CompiledCalls(self.sample, self.subject, kind)

    def _compared(self, what: What, theirs: list[Any]) -> tuple[Status, str]:
        try:
            mine = self._outcome(what, self.device, True)
            wrong = self._difference(mine, theirs, mine)
        except Exception as error:
            wrong = f"raises {said(error)}"
        if wrong is None and all({*leaf.devices} <= {self.device.type} for leaf in mine):
            return "pass", ""
        why = self._plain_error(what)
        if why is not None:
            return "not asked", why
        if self._differs_for_plain_tensors(what, self._outcome(what, self.device, False)):
            return "not asked", f"plain torch gives something else on {self.device.type}"
        if wrong is not None and wrong.startswith("raises OperatorNotFound"):
            return "not asked", f"torchax lacks an operator that the rule uses: {wrong}"
        return "broken", wrong or f"not on {self.device.type}"


LAWS = (
    Law("device", "as on the CPU", cases=cases("results"), exempt=_not_comparable, of_devices=True),
    Law("device-gradients", "as on the CPU", cases=cases("gradients"), exempt=_not_comparable, of_devices=True),
)
