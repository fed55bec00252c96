"""Rows that become wholly invalid although something in them was valid: carried states, and what is broadcast.

A *row* is what one index of the first dimension has, such as a sample of a batch; a number is a row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from masked_dispatch.seeing.calls import Call
from masked_dispatch.seeing.counting import EXPORTS
from masked_dispatch.seeing.event import Event, Found, Line, Notes, any_of_row, valid_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents.factors import first_known
from op_registry.records.extent import numbers_positions

# Categories of operators that take or leave elements, or validity, as they are told.
_TOLD = {"movement", "indexing", "choice", "assignment", "factory", "plumbing", "query", "derivative"}
# Categories of operators that hold a state where there is no step.
_HOLDING = {"choice", "recurrent"}


# What has happened to rows of a state: its kind of finding.
LOST, WENT_ON = "lost rows", "stacked state"


Key = tuple[str, Line, int]


class Loss(NamedTuple):
    """How often each row has been lost, or gone on, in the calls of a line, and in how many of them."""

    times: Tensor
    calls: int

    def or_more(self, other: Loss) -> Loss:
        """Of two operands, that of the later one."""
        return Loss(torch.maximum(self.times, other.times), max(self.calls, other.calls))


@dataclass
class Carried:
    """The rows that a tensor lacks along a dimension because they were lost; and whether that has gone on to another.

    lost  by kind, line, and the number of the first call that lost them (or stacked them with a step past their end)
    """

    dim: int
    lost: dict[Key, Loss] = field(default_factory=dict)
    went_on: bool = False
    tensor: weakref.ref[Tensor] | None = None
    is_step: bool = False
    is_used: bool = False

    @property
    def stays(self) -> bool:
        """Whether the loss matters: not where it is one of the steps that were joined, and nobody has it for itself."""
        return not self.is_step or self.is_used or (self.tensor is not None and self.tensor() is not None)


class LostStates:
    """Rows that a state loses which is carried from call to call of a line: an operator makes them wholly invalid.

    They are reported where they stay lost, which is known at the end of the block: `torch.where` and recurrent cells
    may have held them, and of a stack of all steps those that are there are right.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._at: dict[tuple[str, Line], set[int]] = {}
        self._notes = Notes()
        self._carried: list[Carried] = []

    def note(self, event: Event, line: Line | None) -> None:
        """Note a call, at whatever line."""
        made: dict[int, Carried] = {}
        for taken in event.masked:
            carried: Carried | None = self._notes.get(taken.tensor)
            if carried is None:
                continue
            carried.is_used |= event.name in EXPORTS or event.category == "reduction"
            for number, result in enumerate(event.results):
                dim = event.dim_in_result(taken, carried.dim, number)
                if isinstance(result, MaskedTensor) and dim is not None:
                    holds = event.category in _HOLDING
                    still = _still_lost(carried.lost, ~_rows(valid_of(result), dim), holds)
                    carried.went_on |= bool(still) or holds
                    carried.is_step |= event.category == "join"
                    carried.is_used |= event.category not in ("join", "query")
                    lost = made.setdefault(number, Carried(dim)).lost
                    for key, loss in still.items():
                        lost[key] = loss.or_more(lost.get(key, loss))
        if line is not None and event.result is not None and event.category not in _TOLD:
            self._lose(event, line, made)
        for number, found in made.items():
            if found.lost or event.writes:
                self._notes.set(event.results[number], found)
            if found.lost:
                found.tensor = weakref.ref(event.results[number])
                self._carried.append(found)
        self._carried = [found for found in self._carried if not found.went_on]

    def found(self) -> Iterator[tuple[str, Line, int, int]]:
        """The lines that have lost rows for good, or went on past their end: how many rows, in how many calls."""
        found: dict[Key, tuple[int, int]] = {}
        for carried in filter(lambda c: c.stays, self._carried):
            for key, loss in carried.lost.items():
                found[key] = max(found.get(key, (0, 0)), (int(loss.times.sum()), loss.calls))
        for (kind, line, _), (rows, calls) in found.items():
            yield kind, line, rows, calls

    def _lose(self, event: Event, line: Line, made: dict[int, Carried]) -> None:
        """Note the rows that a call has lost, if a state is carried to it from an earlier call at its line."""
        here, result = (event.name, line), event.result
        earlier = self._at.setdefault(here, set())
        earlier.add(event.call.number)
        assert result is not None
        operands = event.masked
        if len(operands) < 2 or not result.numel():
            return
        own = {id(taken): _dim_of_samples(taken.tensor) for taken in operands}
        dims = [event.dim_in_result(taken, own[id(taken)], 0) for taken in operands]
        dim = next((d for d in dims if d is not None), None)
        if dim is None:
            return
        gone = ~_rows(valid_of(result), dim)
        parts = [
            (_rows(t.valid, own[id(t)]), _rows(t.there, own[id(t)]))
            for t, d in zip(operands, dims, strict=True)
            if d == dim
        ]
        parts = [part for part in parts if len(part[0]) == len(gone)]
        some = functools.reduce(torch.bitwise_or, [valid for valid, _ in parts], torch.zeros_like(gone))
        whole = functools.reduce(torch.bitwise_and, [there for _, there in parts], torch.ones_like(gone))
        kind, rows = (WENT_ON, some & ~whole & ~gone) if event.name == "stack" else (LOST, some & gone)
        if not bool(rows.any()) or not self._descends(event.call, earlier):
            return
        carried = made.setdefault(0, Carried(dim))
        key = next((key for key in carried.lost if key[:2] == (kind, line)), (kind, line, event.call.number))
        before = carried.lost.get(key, Loss(torch.zeros_like(rows, dtype=torch.int64), 0))
        carried.lost[key] = Loss(before.times + rows, before.calls + 1)

    def _descends(self, call: Call, earlier: set[int]) -> bool:
        """Whether an operand of the call has been computed of one of the earlier calls."""
        ahead, seen = [source for operand in call.masked_operands for source in operand.source], set[int]()
        while ahead:
            number = ahead.pop()
            if number in seen or number >= call.number or self._calls[number].backward:
                continue
            if number in earlier:
                return True
            seen.add(number)
            ahead += [source for operand in self._calls[number].masked_operands for source in operand.source]
        return False


def _still_lost(lost: Mapping[Key, Loss], gone: Tensor, holds: bool) -> dict[Key, Loss]:
    """What is still so of a result whose rows are `gone`; holds: of what went on, the step before is held."""
    kept = dict[Key, Loss]()
    for key, loss in lost.items():
        if len(loss.times) == len(gone) and not (holds and key[0] == WENT_ON):
            kept[key] = Loss(loss.times * (gone if key[0] == LOST else ~gone), loss.calls)
    return {key: loss for key, loss in kept.items() if bool(loss.times.any())}


def _rows(elements: Tensor, dim: int) -> Tensor:
    return any_of_row(elements.movedim(dim, 0) if elements.ndim else elements)


def _dim_of_samples(tensor: Tensor) -> int:
    """The dimension that numbers samples, as far as the tensor knows; else the first."""
    extent = tensor._extent if isinstance(tensor, MaskedTensor) else None
    known = first_known(extent.factors) if extent is not None else ()
    return next((d for d, along in enumerate(known) if along is not None and not numbers_positions(along)), 0)


# ----------------------------------------------------------------------------------------------- one value for a row


def one_for_many(event: Event, line: Line) -> Iterator[Found]:
    """Rows, and positions, that meet one invalid element that is there, and have become wholly invalid by it."""
    result = event.result
    if event.category != "elementwise" or result is None or not result.numel() or len(event.masked) < 2:
        return
    shape = result.shape
    known = first_known(result._extent.factors) if result._extent is not None else ()
    features = [d for d, along in enumerate(known) if along is None]
    some, gone = functools.reduce(torch.bitwise_or, [t.valid.expand(shape) for t in event.masked]), ~valid_of(result)
    for taken in event.masked:
        sizes = [1] * (result.ndim - taken.tensor.ndim) + list(taken.tensor.shape)
        many = {d for d, size in enumerate(sizes) if size < shape[d]}
        valid, there = taken.valid.expand(shape), taken.there.expand(shape)

        def lost(dims: list[int], valid: Tensor = valid, there: Tensor = there) -> Tensor:
            has = some.any(dims, keepdim=True) & there.any(dims, keepdim=True) & ~valid.any(dims, keepdim=True)
            return has & gone.all(dims, keepdim=True)

        rows = lost([*range(1, result.ndim)]) if many - {0} else ~gone.new_ones(())
        positions = lost(features) if many and many <= set(features) else ~gone.new_ones(())
        yield Found("lost rows", int(rows.sum()) + int((positions & ~rows).sum()))
