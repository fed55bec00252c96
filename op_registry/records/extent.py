"""What a record knows of its padding: which positions are there, as a value, and what is known of each dimension."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.tracing import under_transform


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


def is_nonempty(along: Along) -> bool:
    """Whether every sample is known to have a position along the dimension."""
    return isinstance(along, Positions) and along.nonempty


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
