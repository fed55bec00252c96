"""What becomes invalid in a call although something in it is valid: rows of a state, and outputs without a weight.

A *row* is what one index of the first dimension has, such as a sample of a batch; a number is a row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.seeing.calls import Call
from masked_dispatch.seeing.checks import Count, Line
from masked_dispatch.seeing.event import EXPORTS, Argument, Event, Notes, any_of_row, in_extent, valid_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents.factors import first_known
from op_registry.records.dense import Dense
from op_registry.records.extent import numbers_positions

# Categories of operators that take or leave elements, or validity, as their arguments say.
_CHOOSING = {"movement", "indexing", "choice", "assignment", "factory", "plumbing", "query", "derivative"}
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
        for argument in event.masked:
            before: Carried | None = self._notes.get(argument.tensor)
            if before is None:
                continue
            before.is_used |= event.name in EXPORTS or event.category == "reduction"
            for number, result in enumerate(event.results):
                dim = event.dim_in_result(argument, before.dim, number)
                if isinstance(result, MaskedTensor) and dim is not None:
                    holds = event.category in _HOLDING
                    still = _still_lost(before.lost, ~_rows(valid_of(result), dim), holds)
                    before.went_on |= bool(still) or holds
                    before.is_step |= event.category == "join"
                    before.is_used |= event.category not in ("join", "query")
                    lost = made.setdefault(number, Carried(dim)).lost
                    for key, loss in still.items():
                        lost[key] = loss.or_more(lost.get(key, loss))
        if line is not None and event.result is not None and event.category not in _CHOOSING:
            self._lose(event, line, made)
        for number, carried in made.items():
            if carried.lost or event.writes:
                self._notes.set(event.results[number], carried)
            if carried.lost:
                carried.tensor = weakref.ref(event.results[number])
                self._carried.append(carried)
        self._carried = [carried for carried in self._carried if not carried.went_on]

    def at_end(self) -> Iterator[tuple[str, Line, int, int]]:
        """The lines that have lost rows for good, or went on past their end: how many rows, in how many calls."""
        losses: dict[Key, tuple[int, int]] = {}
        for carried in filter(lambda c: c.stays, self._carried):
            for key, loss in carried.lost.items():
                losses[key] = max(losses.get(key, (0, 0)), (int(loss.times.sum()), loss.calls))
        for (kind, line, _), (rows, calls) in losses.items():
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
        own = {id(argument): _dim_of_samples(argument.tensor) for argument in operands}
        dims = [event.dim_in_result(argument, own[id(argument)], 0) for argument in operands]
        dim = next((d for d in dims if d is not None), None)
        if dim is None:
            return
        gone = ~_rows(valid_of(result), dim)
        parts = [
            (_rows(t.valid, own[id(t)]), _rows(t.in_extent, own[id(t)]))
            for t, d in zip(operands, dims, strict=True)
            if d == dim
        ]
        parts = [part for part in parts if len(part[0]) == len(gone)]
        some = functools.reduce(torch.bitwise_or, [valid for valid, _ in parts], torch.zeros_like(gone))
        whole = functools.reduce(torch.bitwise_and, [extent for _, extent in parts], torch.ones_like(gone))
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
    return next((d for d, kind in enumerate(known) if kind is not None and not numbers_positions(kind)), 0)


# ----------------------------------------------------------------------------------------------- one value for a row


def one_for_many(event: Event, line: Line) -> Iterator[Count]:
    """Rows, and positions, that meet one invalid element that is there, and have become wholly invalid by it."""
    result = event.result
    if event.category != "elementwise" or result is None or not result.numel() or len(event.masked) < 2:
        return
    shape = result.shape
    known = first_known(result._extent.factors) if result._extent is not None else ()
    features = [d for d, kind in enumerate(known) if kind is None]
    some, gone = functools.reduce(torch.bitwise_or, [t.valid.expand(shape) for t in event.masked]), ~valid_of(result)
    for argument in event.masked:
        sizes = [1] * (result.ndim - argument.tensor.ndim) + list(argument.tensor.shape)
        many = {d for d, size in enumerate(sizes) if size < shape[d]}
        valid, extent = argument.valid.expand(shape), argument.in_extent.expand(shape)

        def lost(dims: list[int], valid: Tensor = valid, extent: Tensor = extent) -> Tensor:
            has = some.any(dims, keepdim=True) & extent.any(dims, keepdim=True) & ~valid.any(dims, keepdim=True)
            return has & gone.all(dims, keepdim=True)

        rows = lost([*range(1, result.ndim)]) if many - {0} else ~gone.new_ones(())
        positions = lost(features) if many and many <= set(features) else ~gone.new_ones(())
        yield ("lost rows", int(rows.sum()) + int((positions & ~rows).sum()))


# ------------------- outputs that are invalid in every sample because all of their weights are, though they have a bias

# A contraction sums over what is valid, and adds the bias to the sum: where no weight is valid there is no sum, and the
# bias is lost. That is right for weights that nobody knows, and rarely what a mask means that prunes.

_WEIGHT, _BIAS = "weight", "bias"
_CELLS = "params"  # weights and biases of recurrent layers, in one list
_PRODUCTS, _SUMS = {"mm", "bmm", "matmul", "einsum"}, {"add", "sub", "rsub"}


class PrunedOutputs:
    """Asks the rule: with valid data the output would still be invalid, and with valid weights it would not.

    It is called with the calls at every line, also torch's own. A product is remembered, which may get its bias by a
    sum: ``x @ w + b``. There, rows are samples, as everywhere in an audit.
    """

    def __init__(self) -> None:
        self._notes = Notes()

    def __call__(self, event: Event) -> Iterator[Count]:
        result = event.result
        if result is None or not result.ndim or not result.numel():
            return
        if event.name in _SUMS:
            yield ("pruned output", self._given_a_bias(event, result))
        elif event.name in _PRODUCTS:
            for argument in event.masked:
                if 0 not in (own := _dims_in_result(event, argument)):
                    pruned = _pruned(event, [argument], [d for d in range(result.ndim) if d not in own])
                    if bool(pruned.any()):
                        self._notes.set(result, pruned)
        elif biases := [argument for argument in event.operands if _is_bias(argument, event)]:
            own = set().union(*(_dims_in_result(event, argument) for argument in biases)) or {result.ndim - 1}
            samples = [d for d in range(result.ndim) if d not in own]
            weights = [t for t in event.masked if t not in biases and _is_weight(t, event, samples)]
            if weights and not event.writes:
                yield ("pruned output", int(_pruned(event, weights, samples).sum()))

    def _given_a_bias(self, event: Event, result: Tensor) -> int:
        """How many pruned outputs of a product a call adds something to that is the same for all samples."""
        for argument in event.operands:
            pruned: Tensor | None = self._notes.get(argument.tensor)
            others = [other for other in event.operands if other is not argument]
            if pruned is None or not others or pruned.ndim != result.ndim:
                continue
            shape = [1] * (result.ndim - others[0].tensor.ndim) + list(others[0].tensor.shape)
            if all(size == 1 or size == own for size, own in zip(shape, pruned.shape, strict=True)):
                return int((pruned & others[0].valid).sum())
        return 0


def _is_bias(argument: Argument, event: Event) -> bool:
    added = event.labels.added if event.labels is not None else ()
    return argument.name == _BIAS or argument.name in added or (argument.name == _CELLS and argument.tensor.ndim == 1)


def _is_weight(argument: Argument, event: Event, samples: Sequence[int]) -> bool:
    """Whether an operand is the weights: by its name, or as a factor that has no samples of a product with a bias."""
    if event.category == "contraction" and event.labels is not None:
        return bool(samples) and not _dims_in_result(event, argument) & set(samples)
    return argument.name == _WEIGHT or (argument.name == _CELLS and argument.tensor.ndim > 1)


def _dims_in_result(event: Event, argument: Argument) -> set[int]:
    """The dimensions of the first result along which an operand has several elements, or one for the only one."""
    shape, ndim = argument.tensor.shape, event.results[0].ndim
    own = [d for d, size in enumerate(shape) if size > 1 or len(shape) < ndim]
    return {d for dim in own if (d := event.dim_in_result(argument, dim, 0)) is not None}


def _pruned(event: Event, weights: Sequence[Argument], samples: Sequence[int]) -> Tensor:
    """Which outputs are invalid in all samples because of these operands; of size 1 along the samples."""
    result = event.results[0]

    def some(elements: Tensor) -> Tensor:
        return elements.any(tuple(samples), keepdim=True) if samples else elements

    pruned = some(in_extent(result)) & ~some(valid_of(result))
    for others_are_valid in (True, False) if bool(pruned.any()) else ():
        chosen = [argument for argument in event.masked if (argument in weights) is not others_are_valid]
        valid = _valid_if(event, chosen)
        if valid is None or valid.shape != result.shape:
            return torch.zeros_like(pruned)
        pruned = pruned & (some(valid) ^ others_are_valid)
    return pruned


def _valid_if(event: Event, known: Collection[Argument]) -> Tensor | None:
    """The mask of the first result of the call, if these operands were valid everywhere; None if that is refused."""
    valid = {id(argument.tensor) for argument in known}

    def made_valid(tensor: Tensor) -> Tensor | None:
        if id(tensor) not in valid or not isinstance(tensor, MaskedTensor):
            return None
        return wrap_record(Dense(torch.ones_like(tensor._data), None))

    result = event.again(made_valid)
    return None if result is None else valid_of(result)
