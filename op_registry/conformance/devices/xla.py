"""Calls on torchax tensors, compiled by XLA: one program for several masks, with garbage under them.

We call the same sample on the CPU, once for each mask. As a control, we call plain torch in the way rules do, by
operators, which torch's autograd records. (torchax implements some of torch's functions itself, and autograd does not
record those.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.devices.calls import Brought, Call, Operand, What, operands
from op_registry.conformance.devices.comparison import Comparison, Status, difference_of, said
from op_registry.conformance.devices.compilations import compilations
from op_registry.conformance.masks import refilled
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject

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
            wrong = difference_of(mine, theirs, mine, self._same)
        except Exception as error:
            wrong = f"raises {said(error)}"
        if wrong is None and all(leaf.device == self.device.type for leaf in mine if isinstance(leaf, Brought)):
            return "equal", ""
        why = self._plain_error(what)
        if why is not None:
            return "not comparable", why
        if self._differs_for_plain_tensors(what, self._outcome(what, self.device, False)):
            return "not comparable", f"plain torch gives something else on {self.device.type}"
        if wrong is not None and wrong.startswith("raises OperatorNotFound"):
            return "not comparable", f"torchax lacks an operator that the rule uses: {wrong}"
        return "different", wrong or f"not on {self.device.type}"
