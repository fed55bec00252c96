"""Factors of an extent, and what is known of each dimension without reading a tensor."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents import stored
from op_registry.records.dense import Dense
from op_registry.records.divided import is_divided
from op_registry.records.tracing import under_transform
from op_registry.records.validity import as_bool, as_int8, intersect
from op_registry.sparse.permuted import AnyRecord, Permuted
from op_registry.sparse.record import Sparse


@dataclass(frozen=True)
class Samples:
    """A dimension whose indices are samples, or whatever else a boolean depends on that has no order of its own.

    apart  whether a join has made it of samples that may lie at different places: they must not be summed
    """

    apart: bool = False


@dataclass(frozen=True)
class Positions:
    """A dimension that numbers the positions of samples.

    contiguous  whether a sample's positions follow one another
    from_start  whether they begin at index 0
    parts       after a join: the size of each part, and what was known of it (None: it is there everywhere)
    nonempty    whether every sample is known to have a position
    """

    contiguous: bool = True
    from_start: bool = True
    parts: tuple[tuple[int, Along], ...] = ()
    nonempty: bool = False

    @property
    def is_prefix(self) -> bool:
        """Whether each sample's positions are the first ones."""
        return self.contiguous and self.from_start


@dataclass(frozen=True)
class Merged:
    """A dimension that is merged of several: the size of each, outermost first, and what was known of it."""

    parts: tuple[tuple[int, Along], ...]

    def is_of_sizes(self, other: Merged) -> bool:
        """Whether another dimension is merged of the same sizes; in a graph, as far as they are known."""
        pairs = zip(self.parts, other.parts, strict=False)
        return len(self.parts) == len(other.parts) and all(known_to_hold(m == n) for (m, _), (n, _) in pairs)


# What is known of a dimension; None: the factor does not depend on it.
Along = Samples | Positions | Merged | None
SAMPLES, PREFIX, SCATTERED = Samples(), Positions(), Positions(contiguous=False, from_start=False)


# What is known of each dimension as a letter: what a constructor states of a batch, and an exported program of its own.
LETTERS: dict[str, Along] = {
    "-": None,
    "s": SAMPLES,
    "p": PREFIX,
    "P": replace(PREFIX, nonempty=True),
    "c": Positions(contiguous=True, from_start=False),
    "f": Positions(contiguous=False, from_start=True),
    "g": SCATTERED,
}


def letters_of(along: Sequence[Along]) -> str:
    """A letter for what is known of each dimension, of which none is merged of others."""
    letters = {known: letter for letter, known in LETTERS.items()}
    plain = (Positions(a.contiguous, a.from_start) if isinstance(a, Positions) else a and SAMPLES for a in along)
    return "".join(letters[a] for a in plain)


def numbers_positions(along: Along) -> bool:
    """Whether indices of the dimension, or of a part of it, are positions."""
    if isinstance(along, Merged):
        return any(numbers_positions(part) for _, part in along.parts)
    return isinstance(along, Positions)


def numbers_samples(along: Along) -> bool:
    """Whether indices of the dimension, or of a part of it, are samples."""
    if isinstance(along, Merged):
        return any(numbers_samples(part) for _, part in along.parts)
    return isinstance(along, Samples)


def is_apart(along: Along) -> bool:
    """Whether samples along the dimension, or a part of it, may lie at different places."""
    if isinstance(along, Merged):
        return any(is_apart(part) for _, part in along.parts)
    return isinstance(along, Samples) and along.apart


def is_prefix(along: Along) -> bool:
    """Whether each sample's positions are known to be the first ones."""
    return isinstance(along, Positions) and along.is_prefix


def as_positions(along: Along) -> Along:
    """A dimension merged of positions and of what lies within each of them: it numbers positions as well."""
    if isinstance(along, Merged):
        first, *rest = [part for size, part in along.parts if not (part is None and known_to_hold(size == 1))] or [None]
        if isinstance(first, Positions) and not any(part is not None for part in rest):
            return Positions(first.contiguous, first.from_start, nonempty=first.nonempty)
    return along


def maybe_empty(along: Along) -> Along:
    """What is known of a dimension where samples may have lost all of their positions."""
    if not isinstance(along, (Positions, Merged)):
        return along
    parts = tuple((size, maybe_empty(part)) for size, part in along.parts)
    return replace(along, parts=parts, nonempty=False) if isinstance(along, Positions) else replace(along, parts=parts)


def without_order(along: Along) -> Along:
    """What is known of a dimension whose elements have been taken in another order."""
    if numbers_positions(along):
        return SCATTERED
    return None if along is None else Samples(is_apart(along))


@dataclass(frozen=True, eq=False)
class Factor:
    """A boolean that says which positions are there.

    along  what is known of each dimension of the tensor
    said   int8 with as many dimensions, of size 1 where the factor does not depend on one, or how to compute it; None:
           what is valid is there
    step   of a factor that depends on no dimension: whether the last on which it did numbered positions, so that it
           says of a step, and not of a sample, that it is there
    """

    along: tuple[Along, ...]
    said: Tensor | Boolean | None = None
    step: bool = False

    @property
    def there(self) -> Tensor:
        """The boolean, computed if it is not yet, of a factor that has one: all of `factors_of` do."""
        found = self.said.value() if isinstance(self.said, Boolean) else self.said
        assert found is not None
        return found

    def moved_by(self, move: Callable[[Tensor], Tensor]) -> Factor:
        """`move` of the boolean, of which as much is known as before."""
        return self.moved(self.along, move)

    def moved(self, along: tuple[Along, ...], move: Callable[[Tensor], Tensor]) -> Factor:
        """`move` of the boolean, of which `along` is known then; computed when somebody asks for it."""
        return replace(self, along=along, said=None if self.said is None else Boolean(move, (self.said,)))

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions whose positions it numbers."""
        return tuple(d for d, along in enumerate(self.along) if numbers_positions(along))

    @property
    def matters(self) -> bool:
        """Whether it may differ from element to element, or between the examples of a vmap."""
        return under_transform() or any(along is not None for along in self.along)

    @property
    def depends(self) -> tuple[int, ...]:
        return tuple(d for d, along in enumerate(self.along) if along is not None)

    def knowing(self, dim: int, along: Along) -> Factor:
        """The same boolean, of which something else is known along a dimension."""
        return replace(self, along=(*self.along[:dim], along, *self.along[dim + 1 :]))


class Boolean:
    """A boolean of a factor that is computed when it is needed, which it rarely is: of booleans, or of an operand.

    In a graph too: most operators of a model never ask, and what a graph traces costs time. One that waits for too many
    others is computed at once: a tensor may be moved a thousand times before anybody asks, and each waiting boolean is
    memory.

    depth  how many wait for one another, this one included
    """

    __slots__ = ("_value", "depth", "move", "of")

    depth: int

    def __init__(self, move: Callable[..., Tensor], of: tuple[Tensor | Boolean, ...]) -> None:
        self.move, self.of = move, of
        self._value: Tensor | None = None
        self.depth = 1 + max([b.depth for b in of if isinstance(b, Boolean)], default=0)
        if self.depth > _DEEPEST:
            self.value()

    def value(self) -> Tensor:
        if self._value is None:
            self._value = self.move(*(b.value() if isinstance(b, Boolean) else b for b in self.of))
            self.of, self.depth = (), 0  # nothing else needs them
        return self._value


_DEEPEST = 32


@dataclass(frozen=True, eq=False)
class State:
    """A step of a recurrence, of which a tensor is the state, or computed from it.

    The state of a sample lives on past its end, so that this hides nothing; states of different steps, stacked, are
    there at the steps that each sample has.

    there       a factor: which samples have the step
    recurrence  a number for the recurrence; None: of a compiled region, which knows it, and nobody outside
    number      a number for the step: results of one call are of one step
    """

    there: Factor
    recurrence: int | None
    number: int

    def moved(self, there: Factor) -> State:
        return State(there, self.recurrence, self.number)


@dataclass(frozen=True, eq=False)
class Extent:
    """Which positions are there: those that every factor has.

    is_mask  whether what is valid is there and nothing else is: a batch that is padded and has no missing values
    new      a dimension that the last call made, and that numbers nothing yet: a join along it keeps its parts apart
    states   steps of recurrences, of which the tensor is the state

    Tensors may share an extent that is their mask and have different masks: the same object says nothing of positions.
    """

    factors: tuple[Factor, ...]
    is_mask: bool
    new: int | None = None
    states: tuple[State, ...] = ()

    @functools.cached_property
    def number(self) -> int:
        """A number for all that is known without reading a tensor."""
        steps = tuple(factor.step for factor in self.factors)
        if len(_numbers) > _MOST:
            _numbers.clear()  # (numbers are not given twice, so that what was remembered of others stays theirs)
        return _numbers.setdefault((self.known, steps, self.is_mask, self.new), next(_counting))

    @functools.cached_property
    def has_parts(self) -> bool:
        """Whether it records parts of a dimension, with their sizes."""
        return any(getattr(along, "parts", ()) for factor in self.factors for along in factor.along)

    @functools.cached_property
    def says(self) -> bool:
        """Whether a factor has a boolean of its own."""
        return any(factor.said is not None for factor in self.factors)

    @functools.cached_property
    def last_dims(self) -> int:
        """How many last dimensions there are on which no factor depends."""
        factors = (*self.factors, *(state.there for state in self.states))
        return min((len(f.along) - 1 - max(f.depends, default=-1) for f in factors), default=2**31)

    @functools.cached_property
    def settled(self) -> Extent:
        """The same after another call, for which no dimension is new."""
        return self if self.new is None else made_of(self.factors, self.is_mask, states=self.states) or self

    @property
    def known(self) -> tuple[tuple[Along, ...], ...]:
        """All that is known without reading a tensor."""
        return tuple(factor.along for factor in self.factors)

    @property
    def places(self) -> tuple[tuple[Along, ...], ...]:
        """The same, but not whether every sample has a position: what differs from batch to batch of one kind."""
        return tuple(tuple(map(maybe_empty, along)) for along in self.known)

    def numbers(self, dim: int) -> bool:
        """Whether `dim` (not negative) numbers positions."""
        return any(numbers_positions(factor.along[dim]) for factor in self.factors)

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions that number positions."""
        return tuple(sorted({d for factor in self.factors for d in factor.positions}))


# Numbers of recurrences and of steps.
NUMBERS = itertools.count(1)
_numbers: dict[Any, int] = {}
_MOST = 8192  # sizes of batches, of which dimensions may be merged
_counting = itertools.count()


def factors_of(record: AnyRecord) -> tuple[Factor, ...]:
    """The factors of a record's extent, each with its boolean; none where it has no extent."""
    extent = record.extent
    if extent is None:
        return ()
    return tuple([replace(f, said=said_of(record, f)) if f.said is None else f for f in extent.factors])


def said_of(record: AnyRecord, factor: Factor) -> Tensor | Boolean:
    """The boolean of a record's factor."""
    if factor.said is not None:
        return factor.said
    as_factor: Callable[[], Tensor]
    if isinstance(record, Dense):
        as_factor = functools.partial(_as_factor, record.validity, record.shape, record.device, factor.along)
    else:
        as_factor = stored.validity_over(record, [d for d, known in enumerate(factor.along) if known is None])
    return Boolean(as_factor, ())


def _as_factor(validity: Tensor | None, sizes: torch.Size, device: torch.device, along: Sequence[Along]) -> Tensor:
    """A validity of data of these sizes, of size 1 where `along` does not depend on a dimension."""
    if validity is None:  # an empty tensor, or a batch without padding
        shape = [1 if a is None else s for a, s in zip(along, sizes, strict=True)]
        return torch.ones(shape, dtype=torch.int8, device=device)
    return fitted(as_int8(validity), sizes, along)


def fitted(there: Tensor, sizes: Sequence[int], along: Sequence[Along]) -> Tensor:
    """A boolean that broadcasts to these sizes as a factor has it: of full size where it depends on a dimension."""
    there = narrowed(there, along)
    broadcast = [d for d, known in enumerate(along) if known is not None and type(there.shape[d]) is int]
    if not any(there.shape[d] == 1 and not known_to_hold(sizes[d] == 1) for d in broadcast):
        return there  # the same object: masks stay shared
    # (one position that is merged with features is of size 1 until here)
    return there.expand([t if known is None else s for t, s, known in zip(there.shape, sizes, along, strict=True)])


def narrowed(there: Tensor, along: Sequence[Along]) -> Tensor:
    """A boolean of full size as a factor has it: of size 1 where it does not depend on a dimension."""
    for dim, known in enumerate(along):
        if known is None and not known_to_hold(there.shape[dim] == 1):
            # (all of its elements are equal; of none, everything can be said)
            if known_to_hold(there.shape[dim] > 0) and not is_divided(there):
                there = there.narrow(dim, 0, 1)
            else:  # (a part of each rank would be gathered from all)
                there = as_int8(as_bool(there).all(dim, keepdim=True))
    return there


def with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """A shape with this size in one of its dimensions."""
    return [size if d == dim else s for d, s in enumerate(shape)]


def conjunction(factors: Sequence[Factor]) -> Tensor | None:
    """Where every factor is; int8 that broadcasts to the tensor; None without factors."""
    return where_all(factors) if factors else None


def where_all(factors: Sequence[Factor]) -> Tensor:
    """Where every factor is, of one or more; int8 that broadcasts to the tensor."""
    there, *others = (factor.there for factor in factors)
    for other in others:
        there = intersect(there, other)
    return there


def any_along(there: Tensor, dims: Sequence[int]) -> Tensor:
    """int8, of size 1 in these dimensions: whether a boolean holds at an index of them."""
    return as_int8(as_bool(there).any(tuple(dims), keepdim=True)) if dims else there


def there(record: AnyRecord) -> Tensor:
    """bool of the record's shape: which positions are there."""
    found = conjunction(factors_of(record))
    if found is None:
        return torch.ones(record.shape, dtype=torch.bool, device=record.device)
    return as_bool(found).expand(record.shape)


def first_known(factors: Sequence[Factor]) -> tuple[Along, ...]:
    """What the first factor that depends on a dimension knows of it, dimension by dimension."""
    return tuple(map(_first_known, zip(*[f.along for f in factors], strict=True)))


def _first_known(alongs: Sequence[Along]) -> Along:
    known = [along for along in alongs if along is not None]
    if not known:
        return None
    return known[0] if all(map(is_nonempty, known)) else maybe_empty(known[0])


def is_nonempty(along: Along) -> bool:
    """Whether every sample is known to have a position along the dimension."""
    return isinstance(along, Positions) and along.nonempty


def index_along(dim: int, size: int, ndim: int, device: torch.device) -> Tensor:
    """0 … size - 1 along `dim` of a tensor of `ndim` dimensions, of size 1 in others."""
    return torch.arange(size, device=device).reshape([-1 if d == dim else 1 for d in range(ndim)])


def along_dim(record: AnyRecord, dim: int) -> Tensor | None:
    """int8: which indices of `dim` are positions that are there, by those factors that depend on it; None: all are."""
    return conjunction([f for f in factors_of(record) if f.along[dim] is not None])


def extent_of(factors: Sequence[Factor], is_mask: bool) -> Extent | None:
    """The extent of these factors, whose boolean is the mask itself where only one is and `is_mask`."""
    if not factors:
        return None
    if is_mask and len(factors) == 1:
        known = tuple((factor.along, factor.step) for factor in factors)
        with contextlib.suppress(TypeError):  # (a size of a graph has no hash)
            return _of_mask(known)
        return Extent(tuple(Factor(along, None, step) for along, step in known), True)
    return Extent(tuple(factors), is_mask)


def made_of(
    factors: Sequence[Factor], is_mask: bool, new: int | None = None, states: tuple[State, ...] = ()
) -> Extent | None:
    """The extent of these factors, with a new dimension, and of a state."""
    found = extent_of(factors, is_mask)
    if new is None and not states:
        return found
    return replace(Extent((), is_mask) if found is None else found, new=new, states=states)


@functools.lru_cache(maxsize=1024)
def _of_mask(known: tuple[tuple[tuple[Along, ...], bool], ...]) -> Extent:
    """The extent whose boolean is the mask: one object, which fast paths ask for, for batches with different masks."""
    return Extent(tuple(Factor(along, None, step) for along, step in known), True)


def with_extent(record: AnyRecord, extent: Extent | None) -> Any:
    """The same record with this extent."""
    if isinstance(record, Dense):
        return Dense(record.data, record.validity, extent)
    if isinstance(record, Sparse):
        return Sparse(record.values, record.pattern, extent)
    return Permuted(record.base, record.order, extent)


def confined(record: AnyRecord, there: Tensor | None) -> Any:
    """The record without its extent, valid where it is there, too."""
    if there is None:
        return with_extent(record, None)
    if isinstance(record, Dense):
        return Dense(record.data, intersect(record.validity, there))
    return stored.masked(record, there)
