"""Numbers taken from sizes of dimensions that number positions, with what each sample alone would have for them.

In an audit, ``x.shape[1]`` of a padded batch is an `int` that also knows the sizes of the samples, and so does what is
computed of it, until that is the same for every sample: of ``y.shape[1] - x.shape[1]`` nothing is known any more.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masked_dispatch.autograd.dense import wrap_record
from masked_dispatch.seeing.checks import Line
from masked_dispatch.seeing.event import EXPORTS, Notes, can_be_read, in_extent, record_of, valid_of
from masked_dispatch.seeing.recorder import leaves
from masked_dispatch.seeing.watching import unrecorded
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents.factors import conjunction, factors_of, first_known, index_along, where_all
from op_registry.records.dense import Dense
from op_registry.records.extent import PREFIX, SAMPLES, Extent, Factor, Positions, numbers_positions
from op_registry.records.validity import as_bool, as_int8, intersect

# The number that each sample alone has; one for all where it is not known sample by sample.
Alone = tuple[float, ...]


class Followed:
    """A number that comes from sizes.

    alone    the number that each sample alone would have
    padding  how many elements of the tensor whose size it is are not there
    """

    alone: Alone
    padding: int

    def __reduce__(self) -> Any:  # a copy, or a file, has the number alone
        return type(plain_number(self)), (plain_number(self),)

    def of_sample(self, index: int, samples: int) -> float:
        """What the sample of this index has, of so many."""
        number = at(self.alone, index, samples)
        return int(number) if isinstance(self, Size) else number

    @property
    def counts_padding(self) -> bool:
        """Whether it is larger than that of a sample alone."""
        return any(abs(n) < abs(plain_number(self)) for n in self.alone)

    @property
    def divides_by_padding(self) -> bool:
        """Whether it is a fraction that is smaller than that of a sample alone."""
        return isinstance(self, float) and any(abs(n) > abs(plain_number(self)) for n in self.alone)


class Size(Followed, int):
    """A whole number that is followed."""


class Ratio(Followed, float):
    """Another number that is followed."""


def followed(value: float, alone: Alone, padding: int) -> Any:
    """The number with what it is for each sample alone; a plain one where that is the same."""
    if all(n == value for n in alone):
        return value
    number = Size(value) if isinstance(value, int) else Ratio(value)
    number.alone, number.padding = alone, padding
    return number


def plain_number(number: Any) -> Any:
    """The same number as torch knows it."""
    return int(number) if isinstance(number, Size) else float(number) if isinstance(number, Ratio) else number


def _computed(function: Callable[..., Any], *numbers: Any) -> Any:
    value = function(*map(plain_number, numbers))
    if type(value) not in (int, float):
        return value
    of = [n for n in numbers if isinstance(n, Followed)]
    kinds = {len(n.alone) for n in of if len(n.alone) > 1}
    samples = next(iter(kinds), 1) if len(kinds) < 2 else 1

    def for_sample(index: int) -> float:
        own = [at(n.alone, index, samples) if isinstance(n, Followed) else n for n in numbers]
        try:
            return function(*own)  # type: ignore[no-any-return]
        except (ZeroDivisionError, ValueError, OverflowError):
            return math.nan

    return followed(value, tuple(map(for_sample, range(samples))), max(n.padding for n in of))


def at(alone: Alone, index: int, samples: int) -> float:
    """What the sample of this index has, of so many; what the smallest has where others are numbered."""
    return alone[index] if len(alone) == samples else min(alone)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return _computed(function, self, *others) if _are_numbers(others) else NotImplemented

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return _computed(function, other, self) if _are_numbers([other]) else NotImplemented

    return method


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(v, (int, float)) for v in values)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Followed, f"__{_name}__", _forward(getattr(operator, _name)))
    setattr(Followed, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _function in (operator.neg, operator.abs, round, math.floor, math.ceil, math.trunc):
    setattr(Followed, f"__{_function.__name__}__", _forward(_function))


# --------------------------------------------------------------------------------------------------- sizes of tensors


def sizes_alone(x: Tensor) -> dict[int, Alone]:
    """For each dimension that numbers positions, how many of them each sample has."""
    factors = factors_of(record_of(x)) if isinstance(x, MaskedTensor) else ()
    if not factors or not x.numel():
        return {}
    extent, known = as_bool(where_all(factors)), first_known(factors)
    positions = [d for d, kind in enumerate(known) if numbers_positions(kind)]

    def counts(dim: int) -> Alone:
        others = [d for d in positions if d != dim]
        return tuple((extent.any(others, keepdim=True) if others else extent).sum(dim).flatten().tolist())

    return {d: counts(d) for d in positions if isinstance(known[d], Positions)}


def size_read(function: str, x: MaskedTensor, dim: int | None, result: Any) -> Any:
    """The result of ``x.shape``, ``x.size(dim)`` or ``x.numel()``, whose numbers are followed."""
    extent = in_extent(x)
    padding = x.numel() - int(extent.sum())
    if not padding or x._extent is None:
        return result
    alone = sizes_alone(x)
    for d in x._extent.positions:
        if d not in alone:  # merged with samples, say
            alone[d] = (int(extent.transpose(0, d).flatten(1).any(1).sum()),)
    sizes = [followed(s, alone[d], padding) if d in alone else s for d, s in enumerate(x.shape)]
    if function in ("numel", "nelement"):
        return math.prod(sizes)
    return torch.Size(sizes) if isinstance(result, tuple) else sizes[dim or 0]


# ------------------------------------------------------------------------------------------------ numbers in arguments


def numbers_in(value: Any) -> Iterator[Followed]:
    """The numbers that are followed in arguments of a call."""
    if isinstance(value, Followed):
        yield value
    elif isinstance(value, slice):
        yield from numbers_in((value.start, value.stop, value.step))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, Mapping):
        yield from numbers_in(tuple(value.values()))


def with_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of a call with `change` of each item that is no list, tuple, slice or dict."""
    if isinstance(value, slice):
        return slice(*(with_each(v, change) for v in (value.start, value.stop, value.step)))
    if isinstance(value, (list, tuple)):
        items = [with_each(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {name: with_each(item, change) for name, item in value.items()}
    return change(value)


# --------------------------------------------------- tensors that have more positions than the samples alone would have

# They have more because a size that a caller used counts padding. Which sizes the samples alone would have, torch says
# itself: the call is made for each sample with its own numbers, on the meta device. A tensor that has more keeps a note
# of it, and each call that takes such a tensor is made again with what a sample alone would not have left out. Where
# that changes a value of what is left, the sizes have reached a result, and the line that has used them is reported. So
# is a line that fills padding, by `to_tensor`, and reduces it.

CUT, LESS, SHAPED = "cut at size", "cut short at size", "shaped by size"


@dataclass
class Origin:
    """A line that has used a size, CUT or SHAPED by it, and how many elements no sample alone would have."""

    kind: str
    line: Line
    count: int
    is_reported: bool = False


class Note(NamedTuple):
    """What the samples alone would have of a tensor, by dimension, where that is less; and the lines that say more."""

    sizes: Mapping[int, Alone]
    origins: tuple[Origin, ...]


class FunctionCall(NamedTuple):
    """A call of a function: what it takes, which lines have made that too large, and where random generators are."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    origins: tuple[Origin, ...]
    random: list[tuple[torch.device, Tensor]]

    def with_each(self, change: Callable[[Any], Any]) -> Any:
        """The results of the call with `change` of each argument."""
        return self.function(*with_each(self.args, change), **with_each(self.kwargs, change))

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", "")).partition(".")[0]

    @property
    def writes(self) -> bool:
        name = self.name
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__", "backward")
        return in_place or self.kwargs.get("out") is not None

    @property
    def makes_new(self) -> bool:
        """Whether its results are as large as its arguments say, and no parts or views of what it takes."""
        return not self.tensors or self.name.startswith("new_")

    @property
    def numbers(self) -> tuple[Followed, ...]:
        """The numbers from sizes that it gets."""
        return tuple(numbers_in([self.args, self.kwargs]))

    @property
    def cuts(self) -> bool:
        """Whether it shows a part of a tensor: a sample alone would cut more of features and tables, too."""
        return self.name in ("__getitem__", "narrow")

    @property
    def divides(self) -> bool:
        """Whether it cuts a tensor into so many parts, or groups, at places that follow from its size."""
        if not self.args or not isinstance(self.args[0], MaskedTensor):
            return False
        grouped = self.name in _INTO_GROUPS and _holds_unknown([*self.args[1:], *self.kwargs.values()])
        return self.name in _INTO_PARTS or grouped


def _holds_unknown(sizes: Sequence[Any]) -> bool:
    """Whether there is a -1 among sizes, one by one or in a list."""
    return any(_holds_unknown(s) if isinstance(s, (list, tuple)) else type(s) is int and s == -1 for s in sizes)


_INTO_GROUPS = ("reshape", "view", "unflatten")
_INTO_PARTS = ("chunk", "unsafe_chunk", "tensor_split", "hsplit", "vsplit", "dsplit")


class SamplesAlone:
    """Calls of functions that were given sizes, and what becomes of their results."""

    def __init__(self) -> None:
        self._notes = Notes()

    def before(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall:
        """A call that is about to be made."""
        tensors = list(leaves([args, kwargs]))
        noted = [note for t in tensors if (note := self._notes.get(t)) is not None]
        origins = {id(o): o for note in noted for o in note.origins if not o.is_reported}
        states = _random_states(tensors) if origins else []
        return FunctionCall(function, args, kwargs, tensors, tuple(origins.values()), states)

    def after(self, call: FunctionCall, result: Any, line: Line | None) -> Iterator[Origin]:
        """The lines to be reported, because what they have of padding reaches the result of this call."""
        if not all(map(can_be_read, (*call.tensors, *leaves(result)))):
            return
        if call.name in EXPORTS:
            self._note_export(call, result, line)
        elif call.numbers or call.divides:
            sizes = {id(t): self._sizes(t) for t in call.tensors}
            count = None if call.writes and result is not None else _placed_by(call, result, sizes)
            if count is not None and line is not None:
                yield Origin(PLACED, line, count)
            else:
                yield from self._note_sizes(call, result, line)
        elif call.origins and not call.writes:
            yield from self._again(call, result, line)

    def _note_export(self, call: FunctionCall, result: Any, line: Line | None) -> None:
        """Note that a plain tensor has numbers where the masked one that it comes from is padded behind."""
        x = call.tensors[0] if call.tensors else None
        sizes = sizes_alone(x) if isinstance(x, MaskedTensor) and isinstance(result, Tensor) else {}
        if x is None or not sizes or line is None or result.shape != x.shape or isinstance(result, MaskedTensor):
            return
        padding = ~in_extent(x)
        if bool(padding.any()) and torch.equal(in_extent(_left_out(result, sizes)[0]), ~padding):
            self._notes.set(result, Note(sizes, (Origin("valid padding", line, int(padding.sum())),)))

    # ---------------------------------------------------------------------------------------------------- with sizes

    def _note_sizes(self, call: FunctionCall, result: Any, line: Line | None) -> Iterator[Origin]:
        """Note which results have more than those of the same call for each sample alone; report those with less."""
        results = list(leaves(result))
        alone = {id(t): self._sizes(t) for t in call.tensors}
        known = [n.alone for n in call.numbers]
        known += [each for sizes in alone.values() for each in sizes.values()]
        kinds = {len(each) for each in known if len(each) > 1}
        samples = next(iter(kinds)) if len(kinds) == 1 else 1
        shapes = [_shapes_alone(call, alone, index, samples) for index in range(samples)] if results else []
        if any(len(each) != len(results) for each in shapes):
            return
        for number, tensor in enumerate(results):
            if any(tensor is t for t in call.tensors) or any(len(each[number]) != tensor.ndim for each in shapes):
                continue
            own = sizes_alone(tensor)
            makes = call.makes_new or call.origins or call.cuts or tensor.numel() > max(t.numel() for t in call.tensors)
            sizes = dict[int, Alone]()
            for d in range(tensor.ndim):
                wanted = tuple(each[number][d] for each in shapes)
                has = own.get(d, (tensor.shape[d],) * samples if makes else wanted)
                if _is_less(has, wanted) and d in own and line is not None and (len(results) == 1 or call.divides):
                    less = sum(int(w - h) for w, h in zip(wanted, has, strict=False) if h < w)
                    yield Origin(LESS, line, less * (tensor.numel() // max(1, tensor.shape[d] * len(has))))
                if _is_less(wanted, has):
                    sizes[d] = tuple(map(min, wanted, has)) if len(wanted) == len(has) else (min(wanted),)
            if sizes:
                self._note(tensor, sizes, call.origins, line, by_size=True)

    def _note(
        self, tensor: Tensor, sizes: Mapping[int, Alone], origins: tuple[Origin, ...], line: Line | None, by_size: bool
    ) -> None:
        """Note that the samples alone have these sizes. by_size: a size at this line says otherwise."""
        cuts = any(d in sizes_alone(tensor) for d in sizes) and not any(o.kind == CUT for o in origins)
        if line is not None and (by_size or cuts):
            more = in_extent(tensor) & ~in_extent(_left_out(tensor, sizes)[0])
            origin = Origin(CUT if cuts else SHAPED, line, int(more.sum()))
            origins = (origin,) if cuts else (*origins, origin)
        if origins:
            self._notes.set(tensor, Note(sizes, origins))

    def _sizes(self, tensor: Tensor) -> dict[int, Alone]:
        note: Note | None = self._notes.get(tensor)
        return {**sizes_alone(tensor), **(note.sizes if note else {})}

    # -------------------------------------------------------------------------------------------------------- again

    def _again(self, call: FunctionCall, result: Any, line: Line | None) -> Iterator[Origin]:
        """Make the call again without what no sample alone would have, and note results that have more than these."""
        by_sample, shortest = True, dict[float, Alone]()

        def put_in(value: Any) -> Any:
            nonlocal by_sample
            note: Note | None = self._notes.get(value) if isinstance(value, Tensor) else None
            if note is None:  # (what has no gradient may be written to, as running statistics are)
                return value.clone() if _is_buffer(value) else value
            tensor, knows_samples = _left_out(value, note.sizes)
            by_sample &= knows_samples
            shortest.update({min(alone): alone for alone in note.sizes.values()})
            return tensor

        try:
            with unrecorded(), _drawing_again(call.random), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = call.with_each(put_in)
        except Exception:  # indices, say, that differ from sample to sample
            yield from self._note_sizes(call, result, line)
            return
        # (beside tensors that know where their samples end, a table that ends with the shortest would cut the others)
        compares = by_sample or not any(sizes_alone(t) and self._notes.get(t) is None for t in call.tensors)
        for tensor, other in zip(leaves(result), leaves(made), strict=False):
            if tensor.shape != other.shape or any(tensor is t for t in call.tensors):
                continue
            if compares and _differ(tensor, other):
                for origin in call.origins:
                    origin.is_reported = True
                yield from call.origins
                return
            own, sizes = sizes_alone(tensor), dict[int, Alone]()
            for d, alone in sizes_alone(other).items():
                alone = shortest.get(min(alone), alone) if min(alone) == max(alone) else alone
                if _is_less(alone, own.get(d, (tensor.shape[d],))):
                    sizes[d] = alone
            if sizes:
                self._note(tensor, sizes, call.origins, line, by_size=False)


def _is_less(alone: Alone, has: Alone) -> bool:
    """Whether a sample has less than another tensor has there."""
    if len(alone) != len(has):
        return min(alone) < min(has)
    return any(a < h for a, h in zip(alone, has, strict=True))


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, MaskedTensor) and not value.requires_grad


def _shapes_alone(
    call: FunctionCall, sizes: Mapping[int, Mapping[int, Alone]], index: int, samples: int
) -> list[torch.Size]:
    """The shapes of the call's results for one sample; none where they depend on values, or the call fails."""

    def alone(value: Any) -> Any:
        if isinstance(value, Followed):
            return value.of_sample(index, samples)
        if isinstance(value, Tensor):
            own = sizes.get(id(value), {})
            shape = [int(at(own[d], index, samples)) if d in own else s for d, s in enumerate(value.shape)]
            return torch.empty(shape, dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        with torch.device("meta"):
            return [t.shape for t in leaves(call.with_each(alone))]
    except Exception:
        return []


def _left_out(tensor: Tensor, sizes: Mapping[int, Alone]) -> tuple[MaskedTensor, bool]:
    """The tensor without what no sample alone would have; and whether that is known for each of its samples."""
    record = record_of(tensor) if isinstance(tensor, MaskedTensor) else Dense(tensor.detach(), None)
    before, ndim = factors_of(record), tensor.ndim
    factors, by_sample = [f for f in before if all(f.along[d] is None for d in sizes)], True
    for d, alone in sizes.items():
        samples = _samples_of(tensor, first_known(before), sizes, len(alone)) if len(alone) > 1 else ()
        if samples is None:
            by_sample, samples, alone = False, (), (min(alone),)
        shape = [tensor.shape[i] if i in samples else 1 for i in range(ndim)]
        own = torch.tensor(alone, device=tensor.device).reshape(shape)
        known = tuple(PREFIX if i == d else SAMPLES if i in samples else None for i in range(ndim))
        factors.append(Factor(known, as_int8(index_along(d, tensor.shape[d], ndim, tensor.device) < own)))
    validity = intersect(record.validity, conjunction([*before, *factors]))
    return wrap_record(Dense(record.data, validity, Extent(tuple(factors), is_mask=False))), by_sample


def _samples_of(
    tensor: Tensor, known: Sequence[Any], sizes: Mapping[int, Alone], samples: int
) -> tuple[int, ...] | None:
    """The dimensions that number these samples: those of which it is known, or the first that is as large."""
    own = tuple(d for d, kind in enumerate(known) if kind is not None and not numbers_positions(kind))
    if own and math.prod(tensor.shape[d] for d in own) == samples:
        return own
    return next(((d,) for d, size in enumerate(tensor.shape) if size == samples and d not in sizes), None)


def _random_states(tensors: Sequence[Tensor]) -> list[tuple[torch.device, Tensor]]:
    """The states of torch's generators that a call with these tensors may draw from."""
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    return [(torch.device("cpu"), torch.get_rng_state()), *((d, torch.cuda.get_rng_state(d)) for d in devices)]


@contextlib.contextmanager
def _drawing_again(states: Sequence[tuple[torch.device, Tensor]]) -> Iterator[None]:
    """The block draws from these states on, and leaves the generators as it finds them."""
    with torch.random.fork_rng(devices=[device for device, _ in states if device.type == "cuda"]):
        for device, state in states:
            torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state, device)
        yield


def _differ(tensor: Tensor, other: Tensor) -> bool:
    """Whether a value that both have is another, by more than rounding."""
    valid = valid_of(tensor) & valid_of(other) & in_extent(other)
    wide = torch.complex128 if other.is_complex() else torch.float64
    a, b = ((t._data if isinstance(t, MaskedTensor) else t)[valid].to(wide) for t in (tensor, other))
    scale = b[b.isfinite()].abs().amax().item() if bool(b.isfinite().any()) else 0
    return not torch.allclose(a, b, rtol=1e-3, atol=1e-6 * scale, equal_nan=True)


# --------------------- numbers from sizes that place something, and would place it elsewhere for a shorter sample alone

# Coordinates that a size spaces (``linspace(-1, 1, x.shape[1])``, ``arange(x.shape[1]) / x.shape[1]``), what is
# interpolated to a size, padding in front by a number of a size, as "same" padding computes it, and an index that is a
# size (``x[:, -x.shape[1]]``).

PLACED = "placed by size"
# What lays its elements out over the size that it gets.
_SCALING = ("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")
# What has no values of its own to compare.
_DRAWN = ("rand", "normal", "empty", "bernoulli")


def _placed_by(call: FunctionCall, result: Any, sizes: Mapping[int, Mapping[int, Alone]]) -> int | None:
    """How many elements a call has placed by a size that is another for some sample alone; None if it has not.

    sizes   what the samples alone have of each tensor that it takes, by its id and dimension
    """
    name = str(getattr(call.function, "__name__", ""))
    if name in _SCALING:
        one = all(size == 1 for size in call.tensors[0].shape[2:])  # (which is the same everywhere)
        return None if one or not call.numbers else sum(t.numel() for t in leaves(result))
    batch = next((t for t in call.tensors if isinstance(t, MaskedTensor)), None)
    if batch is not None:
        if batch._extent is None or not any(_that_place(name, call.args, call.kwargs)):
            return None
        return (result if isinstance(result, Tensor) else batch).numel()
    if type(result) is not Tensor or name.startswith(_DRAWN) or any(result is t for t in call.tensors):
        return None
    samples = max(len(n.alone) for n in call.numbers)
    for index in range(samples):
        own = functools.partial(_alone, index=index, samples=samples, sizes=sizes)
        try:
            with unrecorded(), torch.no_grad():
                made = call.with_each(own)
                if made.shape != result.shape and not _is_part(made, result):
                    return result.numel()
        except Exception:  # sizes that other tensors have, or values that are not compared
            return None
    return None


def _is_part(made: Tensor, result: Tensor) -> bool:
    """Whether a table for a sample alone is part of that for the batch: its start, or of numbers its end or middle too.

    Integers may be positions in any order: it is enough that the batch has the same.
    """
    if made.ndim != result.ndim or not (made.is_floating_point() or made.dtype is torch.bool):
        return bool(torch.isin(made, result).all())
    more = [n - own for n, own in zip(result.shape, made.shape, strict=True)]
    places = (0,) if made.dtype is torch.bool else (0, 1, 2)
    parts = [
        result[tuple(slice(d * place // 2, d * place // 2 + own) for d, own in zip(more, made.shape, strict=True))]
        for place in places
    ]
    return any(part.shape == made.shape and torch.allclose(part, made, equal_nan=True) for part in parts)


def _alone(value: Any, index: int, samples: int, sizes: Mapping[int, Mapping[int, Alone]]) -> Any:
    """An argument as the sample of this index has it."""
    if isinstance(value, Followed):
        return value.of_sample(index, samples)
    if isinstance(value, Tensor):
        for dim, each in sizes.get(id(value), {}).items():
            value = value.narrow(dim, 0, int(at(each, index, samples)))
    return value


def _that_place(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[bool]:
    """Of each number in a call that places something, whether it comes from a size."""
    if name in ("pad", "constant_pad_nd"):
        amounts = kwargs.get("pad", args[1] if len(args) > 1 else ())
        yield from (isinstance(n, Followed) for n in amounts[::2])
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        yield from (isinstance(n, Followed) for n in index)
    if name == "select":
        yield isinstance(kwargs.get("index", args[-1]), Followed)
