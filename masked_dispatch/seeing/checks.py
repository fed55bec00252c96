"""What an audit looks for in the calls of a block: each check is a class, called with every call when it has ended.

A *row* is what one index of the first dimension has, such as a sample of a batch; a number is a row. Only dense tensors
are looked at. What a check remembers of a tensor goes with the tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.seeing.event import Argument, Event, Notes, any_of_row, in_extent, record_of, valid_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.dimensions.labels import Labels
from op_registry.extents.factors import conjunction, factors_of, first_known
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent, Positions
from op_registry.records.validity import intersect

# A kind of :data:`masked_dispatch.seeing.audit.KINDS`, and how many elements; None if nobody has counted, because it
# would have waited for a device.
Count = tuple[str, int | None]


class Line(NamedTuple):
    """A line of the caller's."""

    file: str
    number: int


class Check(Protocol):
    def __call__(self, event: Event, line: Line) -> Iterator[Count]: ...


# ------------------------------------------------------------------------------------------- padding that becomes valid


class ValidPadding:
    """Padding that becomes valid: after `without_extent`, or in a plain tensor that is updated in place.

    Each call on a tensor whose extent was dropped is made again with the extent put back.
    """

    def __init__(self) -> None:
        self._dropped = Notes()

    def __call__(self, event: Event, line: Line) -> Iterator[Count]:
        if event.name == "without_extent":
            self._drop(event.operands[0].tensor, event.results[0])
        elif event.writes:
            yield ("valid padding", self._updated(event))
        elif any(self._dropped.get(argument.tensor) is not None for argument in event.masked):
            yield ("valid padding", self._revived(event))

    def _drop(self, x: Tensor, result: Tensor) -> None:
        if isinstance(x, MaskedTensor) and x._extent is not None and not bool(in_extent(x).all()):
            self._dropped.set(result, _extent_of(x))

    @staticmethod
    def _updated(event: Event) -> int:
        """How much padding an arithmetic update leaves valid in a plain tensor; assignments say so themselves."""
        target = event.operands[0]
        if event.category == "assignment" or target.is_masked:
            return 0
        return sum(int((~t.in_extent).sum()) for t in event.masked if t.tensor.shape == target.tensor.shape)

    def _revived(self, event: Event) -> int:
        result, padded = event.result, self._with_extents(event)
        if result is None or padded is None or padded.shape != result.shape:
            return 0
        revived = valid_of(result) & ~in_extent(padded)
        count = int(revived.sum())
        if padded._extent is not None and not count:  # it is reported once, where it happens
            self._dropped.set(result, _extent_of(padded))
        return count

    def _with_extents(self, event: Event) -> MaskedTensor | None:
        """The first result of the call, of tensors with the extents that were dropped; None if that is refused."""

        if event.name in ("select", "slice") and _cuts_positions(event, self._dropped.get(event.operands[0].tensor)):
            return None  # of ends of the batch nobody is to be warned again
        padded = event.again(self._put_back)
        return padded if isinstance(padded, MaskedTensor) else None

    def _put_back(self, tensor: Tensor) -> Tensor | None:
        extent = self._dropped.get(tensor)
        return None if extent is None else _with_extent(tensor, extent)


def _extent_of(x: MaskedTensor) -> Extent:
    """The extent of a tensor, which the mask doesn't say any more."""
    return Extent(factors_of(record_of(x)), is_mask=False)


def _with_extent(x: Tensor, extent: Extent) -> MaskedTensor:
    assert isinstance(x, MaskedTensor)
    return wrap_record(Dense(x._data, intersect(x._validity, conjunction(extent.factors)), extent))


def _cuts_positions(event: Event, extent: Extent | None) -> bool:
    return extent is not None and extent.numbers(event.named["dim"] % event.operands[0].tensor.ndim)


# ------------------------------------------------------------------------------------------------------------ windows


def windows_too_long(event: Event, line: Line) -> Iterator[Count]:
    """Windows that are longer than a sample, which is not there any more."""
    if event.result is None or event.labels is None or "window" not in event.labels.roles.values():
        return
    argument = event.masked[0]
    rows = event.dim_in_result(argument, 0, 0)
    if rows == 0 and argument.tensor.ndim and len(argument.tensor) == len(event.result):
        yield ("window too long", int((any_of_row(argument.valid) & ~any_of_row(in_extent(event.result))).sum()))


# ---------------------------------------------------------------------------------------------- tables of positions


def tables_on_the_grid(event: Event, line: Line) -> Iterator[Count]:
    """Plain operands along positions, the same for all samples, beside samples whose positions are at other indices.

    Not those along two dimensions in which each sample lies at the same places: tables of differences of positions.
    """
    if len(event.masked) == len(event.operands) or not event.dims:
        return
    labeled = [pair for pair in zip(event.operands, event.dims, strict=True) if len(pair[1]) == pair[0].tensor.ndim]
    elements, places, samples = dict[Any, int](), dict[Any, Tensor](), set[Any]()
    for argument, dims in labeled:
        extent = argument.tensor._extent if isinstance(argument.tensor, MaskedTensor) else None
        known = first_known(extent.factors) if extent is not None else ()
        numbered = [d for d, kind in enumerate(known) if isinstance(kind, Positions)]  # (not merged with samples)
        samples.update(dims[d] for d, kind in enumerate(known) if kind is not None and d not in numbered)
        for d in numbered:
            positions = argument.in_extent.movedim(d, -1)
            indices = torch.arange(positions.shape[-1], device=positions.device)
            moved = positions & (positions.cumsum(-1) - 1 != indices)
            others = [other - (other > d) for other in numbered if other != d]
            elements[dims[d]] = max(elements.get(dims[d], 0), int(moved.sum()))
            places[dims[d]] = positions.any(others, keepdim=True) if others else positions
    for argument, dims in labeled:
        large = [label for label, size in zip(dims, argument.tensor.shape, strict=True) if size > 1]
        shared = [label for label in large if label in places]
        if not shared or argument.is_masked:
            continue
        if not samples.isdisjoint(large) and not _is_table(argument.tensor, dims, samples, shared):
            continue
        if len(shared) != 2 or not _equal(*[places[label] for label in shared]):
            yield ("table on the grid", max(elements[label] for label in shared))


def _is_table(tensor: Tensor, dims: Sequence[Any], samples: set[Any], positions: Sequence[Any]) -> bool:
    """Whether a tensor is the same for all samples, though written out for each, and another at other positions."""

    def differs(labels: Collection[Any]) -> bool:
        along = [d for d, label in enumerate(dims) if label in labels and tensor.shape[d] > 1]
        return any(bool((tensor != tensor.narrow(d, 0, 1)).any()) for d in along)

    return tensor.numel() > 0 and not differs(samples) and differs(positions)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape[-1] == b.shape[-1] and bool((a == b).all())


# ------------------------------------------------------------------------------------------------------ ends of a batch


def batch_ends(event: Event, line: Line) -> Iterator[Count]:
    """Ends of a batch that show padding of shorter samples."""
    if event.batch_end:
        yield ("batch end", sum(int((~in_extent(result)).sum()) for result in event.results))


# --------------------------------------------------------------------------------------------------------------- means

_MEANS = {"mean", "nanmean", "var", "std", "var_mean", "std_mean"}
_BY_MEAN = 1  # the number by which losses know reduction="mean"


class RowsLeftOut:
    """Means over the first dimension that leave out rows that are there, because nothing in them is valid.

    A loss does so rightly where the target is missing. Rows that are sums of nothing have a kind of their own.
    """

    def __init__(self) -> None:
        self._empty_sums = Notes()

    def __call__(self, event: Event, line: Line) -> Iterator[Count]:
        self._follow(event)
        is_loss = event.named.get("reduction") == _BY_MEAN
        if not is_loss and not (event.name in _MEANS and 0 in reduced(event)):
            return
        operands = [argument for argument in event.masked if argument.tensor.ndim]
        sizes = {len(argument.tensor) for argument in operands}
        if len(sizes) != 1 or event.result is None or not bool(valid_of(event.result).any()):
            return
        valid = functools.reduce(torch.bitwise_and, [any_of_row(argument.valid) for argument in operands])
        extent = functools.reduce(torch.bitwise_and, [any_of_row(argument.in_extent) for argument in operands])
        left_out = extent & ~valid
        for argument in operands:
            empty = self._empty_sums.get(argument.tensor)
            if empty is not None:
                yield ("sums of nothing", int((left_out & empty).sum()))
                left_out = left_out & ~empty
        for argument in operands if is_loss else ():
            if argument.name == "target":
                left_out = left_out & any_of_row(argument.valid)
        yield ("rows left out", int(left_out.sum()))

    def _follow(self, event: Event) -> None:
        """Note the rows of a result that are sums of nothing, or computed from them element by element."""
        result = event.result
        if result is None or not result.ndim:
            return
        empty: Tensor | None
        if event.name in _SUMS:
            empty = any_of_row(in_extent(result))
        elif event.category in ("elementwise", "movement"):
            notes = [self._empty_sums.get(argument.tensor) for argument in event.masked]
            empty = next((note for note in notes if note is not None and len(note) == len(result)), None)
        else:
            return
        rows = None if empty is None else empty & ~any_of_row(valid_of(result))
        if rows is not None and bool(rows.any()):
            self._empty_sums.set(result, rows)


class Nothing(NamedTuple):
    """Which numbers of a tensor have been reduced from no position of their sample, and along which dimension such
    results have been joined, if they have.
    """

    numbers: Tensor
    dim: int | None = None


class NumbersOfNothing:
    """Means that count numbers of nothing: of results over parts of a batch, which shorter samples don't reach.

    It is called with the calls at every line, also torch's own.
    """

    def __init__(self) -> None:
        self._notes = Notes()

    def __call__(self, event: Event) -> Iterator[Count]:
        result, masked = event.result, event.masked
        note: Nothing | None = self._notes.get(masked[0].tensor) if masked else None
        if note is not None and event.name in _MEANS and note.dim in reduced(event):
            rest = note.numbers.all(reduced(event), keepdim=True)
            yield ("numbers of nothing", int((note.numbers & ~rest).sum()))
        elif result is not None and event.labels is not None and event.dims:
            try:
                nothing = self._of(event, event.labels, note)
            except (RuntimeError, TypeError, KeyError):  # it doesn't move booleans
                nothing = None
            if nothing is not None and nothing.numbers.shape == result.shape:
                numbers = nothing.numbers & valid_of(result)
                if bool(numbers.any()):
                    self._notes.set(result, Nothing(numbers, nothing.dim))

    def _of(self, event: Event, labels: Labels, note: Nothing | None) -> Nothing | None:
        """Which numbers of the first result come from nothing."""
        argument, result = event.masked[0], event.results[0]
        if event.category == "join":
            notes = [(self._notes.get(a.tensor), a) for a in event.operands]
            parts = [note.numbers if note else torch.zeros_like(a.in_extent) for note, a in notes]
            dim = next((d for d, label in enumerate(labels.results[0]) if labels.role_of(label) == "joined"), None)
            return Nothing(event.op(**{**event.named, "tensors": parts}), dim)
        gone = [d for d, label in enumerate(event.dims[0]) if labels.role_of(label) == "reduced"]
        if gone and argument is event.operands[0] and note is None:
            return Nothing((~argument.in_extent).all(gone, keepdim=result.ndim == argument.tensor.ndim))
        if gone or note is None or len(event.masked) != 1:
            return None
        if event.category == "movement":
            moved = event.op(**{**event.named, argument.name: note.numbers})
            dim = None if note.dim is None else event.dim_in_result(argument, note.dim, 0)
            return Nothing(moved, dim) if isinstance(moved, Tensor) else None
        if note.numbers.shape[:-1] == result.shape[:-1] and note.dim != result.ndim - 1:  # as a linear map has them
            return Nothing(note.numbers.all(-1, keepdim=True).expand(result.shape), note.dim)
        return note


def reduced(event: Event) -> tuple[int, ...]:
    """The dimensions that a reduction of the first operand reduces."""
    ndim, dims = event.operands[0].tensor.ndim, event.named.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({d % ndim for d in dims})) if dims else tuple(range(ndim))


# ------------------------------------------------------------------------------------------------------------ matrices


def lost_matrices(event: Event, line: Line) -> Iterator[Count]:
    """Factorizations and solutions without a valid element, of matrices with a hole and something valid."""
    result = event.result
    if event.category != "whole slices" or result is None or not result.numel() or bool(valid_of(result).any()):
        return
    operands = event.masked
    if any(bool((t.in_extent & ~t.valid).any()) for t in operands) and all(bool(t.valid.any()) for t in operands):
        yield ("lost matrix", len(result) if result.ndim else 1)


def own_transposes(event: Event, line: Line) -> Iterator[Count]:
    """Products of a matrix and its own transpose that sum over other elements for each pair of rows.

    What is centred may leave out holes, as 0 is its mean.
    """
    if event.name not in _MATRIX_PRODUCTS or len(event.masked) != 2:
        return
    a, b = event.operands
    if a.tensor.ndim < 2 or not _is_same_memory(a.tensor, b.tensor.mT):
        return
    some = a.valid.any(-1, keepdim=True)
    holes = a.in_extent & ~a.valid & some & a.valid.any(-2, keepdim=True)
    values = torch.where(a.valid, _data_of(a.tensor), 0).detach()
    is_centred = values.sum(-1, keepdim=True).abs() <= 1e-3 * values.abs().sum(-1, keepdim=True)
    yield ("own transpose", int((holes & ~is_centred).sum()))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    a, b = _data_of(a), _data_of(b)
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.numel() > 0


def _data_of(tensor: Tensor) -> Tensor:
    return tensor._data if isinstance(tensor, MaskedTensor) else tensor


# ------------------------------------------------------------------------------------------------------------- factors

_PRODUCTS = {"mul", "dot", "vdot", "inner", "einsum"}
_MATRIX_PRODUCTS = {"mm", "bmm", "matmul"}
# Functions of torch that reduce a plain tensor to a statistic of it.
_STATISTICS = {"sum", "nansum", "mean", "nanmean", "var", "std", "dot", "vdot"}


class Family:
    """A plain tensor, its views, and what is computed from it element by element.

    reduced  whether a statistic of one of them has been computed
    waiting  the products that leave out some of its elements, and how many, to be reported then
    """

    def __init__(self) -> None:
        self.reduced = False
        self.waiting: list[tuple[Line, int]] = []


class Factors:
    """Products whose factors aren't valid in the same elements, where statistics of each factor are of other elements.

    Of two masked factors this is certain at once. A plain factor counts what the product leaves out where it is reduced
    by itself, before or after.
    """

    def __init__(self) -> None:
        self._families = Notes()

    def __call__(self, event: Event, line: Line) -> Iterator[Count]:
        pair = _pair(event)
        if pair is None or not pair[0].tensor.numel():
            return
        a, b = pair
        if a.is_masked and b.is_masked:
            yield ("factors differ", int(((a.valid ^ b.valid) & a.in_extent & b.in_extent).sum()))
            return
        masked, plain = (a, b) if a.is_masked else (b, a)
        count = int(((plain.tensor != 0) & ~masked.valid).sum())
        family = self._family(next(argument.tensor for argument in event.operands if not argument.is_masked))
        if family.reduced:
            yield ("plain factor", count)
        elif count:
            family.waiting.append((line, count))

    def computed(self, function: str, operands: Sequence[Tensor], result: object) -> list[tuple[Line, int]]:
        """Note a call with plain tensors alone; return the products that are to be reported because of it."""
        first = next((t for t in operands if t.numel() > 1), None)
        if first is None or not isinstance(result, Tensor):
            return []
        family = self._family(first)
        if function in _STATISTICS or function.endswith("norm"):
            waiting, family.waiting, family.reduced = family.waiting, [], True
            return waiting
        if result.numel() == first.numel() and self._families.get(result) is None:
            self._families.set(result, family)
        return []

    def _family(self, tensor: Tensor) -> Family:
        family: Family | None = self._families.get(tensor)
        if family is None:
            family = Family()
            self._families.set(tensor, family)
        return family


def _pair(event: Event) -> tuple[Argument, Argument] | None:
    """Two factors of one shape; of a product of matrices, as they are summed over: the second one transposed."""
    if len(event.operands) != 2 or event.name not in _PRODUCTS | _MATRIX_PRODUCTS:
        return None
    a, b = event.operands
    if a.tensor is b.tensor:
        return None
    if event.name in _MATRIX_PRODUCTS and a.tensor.ndim == b.tensor.ndim > 1:
        b = replace(b, tensor=b.tensor.mT, validity=None if b.validity is None else b.valid.mT)
    return (a, b) if a.tensor.shape == b.tensor.shape else None


# ---------------------------------------------------------------------------------------------------------------- sums

_SUMS, _DIVISIONS = {"sum", "nansum"}, {"div", "true_divide"}
_COUNTS = {"count", "count_nonzero", "masked_dispatch::count"}
_SUMS_AT_INDICES = {"index_add": "source", "scatter_add": "src"}


class Part(NamedTuple):
    """What a sum has added: how many elements or rows there were, and how many of them it left out (or 0)."""

    size: Tensor | int
    left_out: Tensor


class DividedSums:
    """Sums that left something out, and are divided by the number of what there was."""

    def __init__(self) -> None:
        self._sums, self._counts = Notes(), Notes()

    def __call__(self, event: Event, line: Line) -> Iterator[Count]:
        if not event.operands or not event.results:
            return
        first, result = event.operands[0].tensor, event.results[0]
        parts: list[Part] | None = self._sums.get(first)
        if event.name in _SUMS:
            self._keep(result, list(_parts(event)))
        elif event.name in _SUMS_AT_INDICES:
            self._keep(result, [_part_at_indices(event)])
        elif event.name in _COUNTS:
            self._counts.set(result, True)
        elif parts and event.name in _DIVISIONS and not self._is_count(event.named["other"]):
            yield ("divided by size", _left_out(parts, _number(event.named["other"], result)))
        elif parts and event.name == "mul":
            yield ("divided by size", _left_out(parts, 1 / _number(event.named["other"], result)))
        elif parts and first.numel() == result.numel() and len(event.operands) == 1 and _keeps_values(event):
            kept = [Part(_like(p.size, result), p.left_out.reshape(result.shape)) for p in parts]
            self._sums.set(result, kept)

    def divided(self, numerator: Tensor, other: object) -> int:
        """How many elements of a plain sum that is divided are to be reported."""
        parts = self._sums.get(numerator)
        return _left_out(parts, _number(other, numerator)) if parts and not self._is_count(other) else 0

    def _is_count(self, divisor: object) -> bool:
        """Whether a divisor is the number of what is valid, which may happen to be that of what there was."""
        return isinstance(divisor, Tensor) and bool(self._counts.get(divisor))

    def _keep(self, result: Tensor, parts: Sequence[Part]) -> None:
        kept = [part for part in parts if bool(part.left_out.any())]
        if kept:
            self._sums.set(result, kept)


def _keeps_values(event: Event) -> bool:
    return event.category == "movement" or event.name in ("to", "clone", "reshape", "flatten")


def _like(size: Tensor | int, result: Tensor) -> Tensor | int:
    return size.reshape(result.shape) if isinstance(size, Tensor) else size


def _parts(event: Event) -> Iterator[Part]:
    """What a sum leaves out of the elements it adds; and of the rows, along each of several dimensions it reduces."""
    x, dims = event.operands[0], reduced(event)
    keepdim, result = bool(event.named.get("keepdim")), valid_of(event.results[0])
    if not x.tensor.ndim or not x.tensor.numel():
        return
    left_out = (~x.valid).sum(dims, keepdim)
    yield Part(math.prod(x.tensor.shape[d] for d in dims), left_out * result)
    for dim in dims if len(dims) > 1 else ():
        rows = any_of_row(x.valid.transpose(0, dim))
        yield Part(x.tensor.shape[dim], (~rows).sum() * result)


def _part_at_indices(event: Event) -> Part:
    source = next(t for t in event.operands if t.name == _SUMS_AT_INDICES[event.name])
    into = torch.zeros(event.results[0].shape, dtype=torch.float64, device=source.tensor.device)

    def counted(elements: Tensor) -> Tensor:
        add = getattr(into, event.name)
        return add(event.named["dim"], event.named["index"], elements.to(into.dtype))

    return Part(counted(torch.ones_like(source.valid)), counted(~source.valid) * valid_of(event.results[0]))


def _number(value: Any, beside: Tensor) -> Tensor:
    return torch.as_tensor(value._data if isinstance(value, MaskedTensor) else value, device=beside.device)


def _left_out(parts: Sequence[Part], divisor: Tensor) -> int:
    """How many elements or rows are left out where the divisor is the number of what there was.

    A size is one number for all sums: a divisor of several numbers is none, though some of them may be the size.
    """
    if isinstance(parts[0].size, int) and divisor.numel() > 1 and bool((divisor != divisor.flatten()[0]).any()):
        return 0
    same = [((divisor - size).abs() < size * 1e-6) * left_out for size, left_out in parts]
    return max(int(count.sum()) for count in same)
