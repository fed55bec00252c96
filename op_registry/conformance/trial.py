"""A trial: one sample under one set of masks, given to one subject; and the exceptions by which a law reports.

A law is a function of a :class:`Trial`. It returns when it holds, and raises :class:`Broken` with what was wrong,
:class:`NotAsked` where the trial does not test it, or what the subject raised.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance import plain_torch
from op_registry.conformance.compare import ROUNDING, bit_difference, mask_difference
from op_registry.conformance.masks import PLAIN, Masking, refilled
from op_registry.conformance.oracles import Refused, expected
from op_registry.conformance.randomness import start_random_numbers
from op_registry.conformance.sample import Sample
from op_registry.conformance.subject import Subject
from op_registry.conformance.trees import tree_leaves

# Floating point with fewer digits than sums and products of what the samples hold need.
NARROW = (torch.float16, torch.bfloat16)


class Broken(AssertionError):
    """The law does not hold; the message says how."""


class NotAsked(Exception):
    """The trial does not test the law; the message says why."""


class Densified(Exception):
    """The law holds, but a sparse tensor had to be stored densely; the message says which."""


class Refusal(Exception):
    """The subject refused a call for which there is an answer."""


class RefusedRightly(Exception):
    """The law holds, and the call has no answer: the semantics refuse it, and so does the subject."""


def storage_of(name: str) -> tuple[str, bool]:
    """What the name of a storage says: how tensors are stored, and whether only the first of several is (csr_first)."""
    layout = name.removesuffix("_first")
    return layout, layout != name


@dataclass(frozen=True)
class Trial:
    """One sample under one set of masks, given to one subject."""

    subject: Subject
    sample: Sample
    masking: Masking
    seed: int = 0

    @functools.cached_property
    def masks(self) -> list[Tensor | None]:
        """The full mask of each tensor of the sample; None for one that stays plain."""
        return self.masking.full(self.sample.tensors)

    @functools.cached_property
    def partial(self) -> bool:
        """Whether anything is invalid."""
        return any(mask is not None and not bool(mask.all()) for mask in self.masks)

    def wrapped(
        self,
        fill: str | None = None,
        gradients: bool = False,
        storage: str | None = None,
        explicit_invalid: bool = False,
    ) -> tuple[Any, Any, list[Any]]:
        """Arguments for the subject, and the value that each tensor became.

        Hidden data is overwritten by `fill`; masked tensors are stored as `storage` says, where that fits: "csr" all of
        them, "csr_first" only the first. `explicit_invalid` stores invalid elements beside the valid ones.
        """
        values: list[Any] = []
        layout, only_first = storage_of(storage or "")
        done = False
        found = dict(zip(map(id, self.sample.tensors), zip(self.masking.masks, self.masks, strict=True), strict=True))

        def wrap(tensor: Tensor) -> Any:
            nonlocal done
            mask, full = found[id(tensor)]
            data = refilled(tensor, full, fill) if fill else tensor.detach().clone()
            wanted = gradients and self.may_have_gradient(len(values))
            if mask is PLAIN:
                value: Any = data.requires_grad_(wanted)
            else:
                value = self.subject.wrap(data, mask, wanted)
                if layout and not (done and only_first):
                    dense, value = value, self.subject.stored(value, layout, wanted, explicit_invalid)
                    done = done or value is not dense
            values.append(value)
            return value

        args, kwargs = self.sample.with_tensors(wrap)
        return args, kwargs, values

    def plain(self) -> Any:
        """Plain torch's result, and the tensors that it wrote to."""
        written = self.written
        args, kwargs, copies = self.copies()
        start_random_numbers(self.seed)
        result = self.sample.fn(*args, **kwargs)
        return result, [copies[n] for n in written]

    def on_other_values(
        self, masked_only: bool = False, change: Callable[[Tensor], Tensor] = plain_torch.in_reverse
    ) -> Trial:
        """The same call with its tensors (those that are masked) changed: their elements in reverse order."""
        masked = {id(t): mask is not None for t, mask in zip(self.sample.tensors, self.masks, strict=True)}

        def other(tensor: Tensor) -> Tensor:
            changes = masked[id(tensor)] or not masked_only
            return change(tensor) if changes else tensor.detach().clone()

        args, kwargs = self.sample.with_tensors(other)
        return dataclasses.replace(self, sample=dataclasses.replace(self.sample, args=args, kwargs=kwargs))

    def outcome(self, fill: str | None = None) -> list[Any]:
        """What the subject gives: for each result and each argument written to (data, mask or None), or a value."""
        args, kwargs, values = self.wrapped(fill)
        result = self.run_on(args, kwargs, values)
        return observed(self.subject, [result, [values[n] for n in self.written]])

    def run_on(self, args: Any, kwargs: Any, values: list[Any]) -> Any:
        """The subject's own result; Broken where one of the operands, `values`, was written to, and not by torch."""
        before = [self._seen(value) for value in values]
        result = self.run(args, kwargs)
        self._leaves_alone(values, before)
        return result

    def _seen(self, value: object) -> tuple[Tensor, Tensor | None]:
        """Copies of a value's data and mask."""
        data, mask = self.subject.observe(value)
        return data.detach().clone(), None if mask is None else mask.clone()

    def _leaves_alone(self, values: list[Any], before: list[tuple[Tensor, Tensor | None]]) -> None:
        """Operands that plain torch does not write to keep mask and data bit for bit, under the mask too: it may be
        the caller's memory."""
        touched = plain_torch.forward(self.sample, self.seed).touched
        for position, (value, (data, mask)) in enumerate(zip(values, before, strict=True)):
            if position in touched:
                continue
            now, now_valid = self.subject.observe(value)
            wrong = bit_difference(now, data)
            if not wrong and mask is not None:
                wrong = "it is plain" if now_valid is None else mask_difference(now_valid, mask)
            if wrong:
                raise Broken(f"operand {position} is another one after the call: {wrong}")

    def may_have_gradient(self, position: int) -> bool:
        """Whether a tensor of the sample is one to differentiate by: numbers, which the call does not overwrite."""
        return position in plain_torch.variables(self.sample, self.seed)

    @property
    def derivative_order(self) -> int:
        """How often plain torch differentiates the call, up to twice; found by trying (plain_torch.py)."""
        return plain_torch.derivative(self.sample, self.seed).order

    def copies(self, gradients: bool = False) -> tuple[Any, Any, list[Tensor]]:
        """Plain copies of the arguments, and of each tensor among them."""
        made: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            wanted = gradients and self.may_have_gradient(len(made))
            made.append(tensor.detach().clone().requires_grad_(wanted))
            return made[-1]

        args, kwargs = self.sample.with_tensors(copy)
        return args, kwargs, made

    @functools.cached_property
    def magnitude(self) -> float:
        """Of what the call computes with, where its dtype holds so few digits that sums of it lose all of their own."""
        found = [
            t.abs()[t.isfinite()].max() for t in self.sample.tensors if t.dtype in NARROW and bool(t.isfinite().any())
        ]
        return max([1.0, *map(float, found)])

    @functools.cached_property
    def rounding(self) -> float:
        """Of the coarsest of the arguments: what torch computes from it alone is no finer."""
        return max((ROUNDING.get(t.dtype, 0.0) for t in self.sample.tensors), default=0.0)

    @property
    def written(self) -> tuple[int, ...]:
        """Which tensors of the sample plain torch writes to, and does not give back."""
        return plain_torch.forward(self.sample, self.seed).written

    @property
    def plain_error(self) -> str | None:
        """What plain torch says where it does not run the call: the only thing that excuses a failing trial."""
        return plain_torch.forward(self.sample, self.seed).error

    def run(self, args: Any, kwargs: Any) -> Any:
        """The subject's own result, random numbers as they were in every other run."""
        start_random_numbers(self.seed)
        return self.subject.call(self.sample.fn, *args, **kwargs)

    def expected(self) -> list[Any]:
        """What the oracles say: Expected, plain tensors and Python values."""
        args, kwargs, copies = self.copies()
        masks = {id(t): m for t, m in zip(copies, self.masks, strict=True) if m is not None}
        also = [copies[n] for n in self.written]
        start_random_numbers(self.seed)
        return tree_leaves(expected(self.sample.fn, args, kwargs, masks, also))


def observed(subject: Subject, result: object) -> list[Any]:
    """Each leaf of a result as (data, mask or None), or as the Python value that it is."""
    leaves = tree_leaves(result, is_leaf=subject.is_value)
    return [subject.observe(leaf) if subject.is_value(leaf) else leaf for leaf in leaves]


def refused_by_the_semantics(trial: Trial) -> bool:
    """Whether the oracles say that this call has no answer, so that a subject has to refuse it."""
    try:
        trial.expected()
    except Refused:
        return True
    except Exception:
        # No oracle, or plain torch cannot run the call: nobody says that it has to be refused.
        return False
    return False


Law = Callable[[Trial], None]
