"""Numbers taken from sizes of dimensions that number positions, with what each sample alone would have for them.

In an audit, ``x.shape[1]`` of a padded batch is an `int` that also knows the sizes of the samples, and so does what is
computed of it, until that is the same for every sample: of ``y.shape[1] - x.shape[1]`` nothing is known any more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.seeing.event import record_of, there_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.extents.factors import factors_of, first_known, where_all
from op_registry.records.extent import Positions, numbers_positions
from op_registry.records.validity import as_bool

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
    there, known = as_bool(where_all(factors)), first_known(factors)
    positions = [d for d, along in enumerate(known) if numbers_positions(along)]

    def along(dim: int) -> Alone:
        others = [d for d in positions if d != dim]
        return tuple((there.any(others, keepdim=True) if others else there).sum(dim).flatten().tolist())

    return {d: along(d) for d in positions if isinstance(known[d], Positions)}


def size_read(function: str, x: MaskedTensor, dim: int | None, result: Any) -> Any:
    """The result of ``x.shape``, ``x.size(dim)`` or ``x.numel()``, whose numbers are followed."""
    there = there_of(x)
    padding = x.numel() - int(there.sum())
    if not padding or x._extent is None:
        return result
    alone = sizes_alone(x)
    for d in x._extent.positions:
        if d not in alone:  # merged with samples, say
            alone[d] = (int(there.transpose(0, d).flatten(1).any(1).sum()),)
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
