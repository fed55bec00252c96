"""An extent apart: its booleans, sizes, and what is known without either, for graphs; in plain values, for files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import factors_of, narrowed
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    NUMBERS,
    SAMPLES,
    Along,
    Extent,
    Factor,
    Merged,
    Positions,
    Samples,
    State,
    extent_of,
    maybe_empty,
)


@dataclass(frozen=True)
class Known:
    """What is known of an extent; two extents that are equal in this differ in booleans and sizes alone.

    along   of each factor; the sizes of parts are left out (0)
    stored  whether each factor has a boolean of its own
    sizes   how many sizes its parts have
    steps   whether each factor says of a step that it is there
    states  of each step that the tensor is a state of, the same as of a factor. Which recurrence it is of is not told:
            a graph serves all
    """

    along: tuple[tuple[Along, ...], ...]
    stored: tuple[bool, ...]
    sizes: int
    is_mask: bool
    steps: tuple[bool, ...] = ()
    new: int | None = None
    states: tuple[tuple[tuple[Along, ...], bool], ...] = ()

    @property
    def booleans(self) -> int:
        """How many booleans of its own the extent has."""
        return sum(self.stored) + len(self.states)


def serves(compiled: Known | None, given: Known | None) -> bool:
    """Whether a graph compiled for an extent of which the first is known serves one of which the second is.

    A graph for samples of which some may have no position serves those that all have one.
    """
    if compiled == given or compiled is None or given is None:
        return compiled == given
    return compiled == replace(given, along=tuple(tuple(map(maybe_empty, along)) for along in given.along))


def known_of(extent: Extent) -> Known:
    """All of an extent that graphs guard on."""
    left_out = itertools.repeat(0)
    along = tuple(tuple(_with_sizes(a, left_out) for a in f.along) for f in extent.factors)
    stored = tuple(f.said is not None for f in extent.factors)
    steps = tuple(f.step for f in extent.factors)
    states = tuple((s.there.along, s.there.step) for s in extent.states)
    return Known(along, stored, len(sizes_in(extent)), extent.is_mask, steps, extent.new, states)


def booleans_of(extent: Extent) -> list[Tensor]:
    """The booleans that factors have of their own, and those of states."""
    return [f.there for f in extent.factors if f.said is not None] + [s.there.there for s in extent.states]


def sizes_in(extent: Extent) -> list[int]:
    """The sizes of all parts, of joins and merges, in order."""
    return [size for f in extent.factors for a in f.along for size in _sizes_of(a)]


def shape_of_sizes(extent: Extent) -> list[int]:
    """The shape of a tensor that carries the sizes: it has no element, and no dimension in common with the data."""
    ndim = len(extent.factors[0].along)
    return [0] * (ndim + 1) + sizes_in(extent)


def together(known: Known, booleans: Sequence[Tensor], shape: Sequence[int]) -> Extent:
    """The extent of these pieces; `shape` is that of the tensor that carries the sizes, if it has any."""
    rest, sizes = iter(booleans), iter(shape[len(shape) - known.sizes :])
    factors = [
        Factor(tuple(_with_sizes(a, sizes) for a in along), next(rest) if stored else None, step)
        for along, stored, step in zip(known.along, known.stored, known.steps, strict=True)
    ]
    states = [State(Factor(along, next(rest), step), None, next(NUMBERS)) for along, step in known.states]
    return Extent(tuple(factors), known.is_mask, known.new, tuple(states))


def with_booleans(extent: Extent, booleans: Sequence[Tensor]) -> Extent:
    """The same extent with these booleans, which may be expanded, for those that it has of its own."""
    rest = iter(booleans)

    def with_next(f: Factor) -> Factor:
        return replace(f, said=narrowed(next(rest), f.along))

    return _changed(extent, lambda f: f if f.said is None else with_next(f))


def _changed(extent: Extent, change: Callable[[Factor], Factor]) -> Extent:
    """The extent with changed factors, those of its states too."""
    factors = tuple(map(change, extent.factors))
    return Extent(factors, extent.is_mask, states=tuple(s.moved(change(s.there)) for s in extent.states))


# ----------------------------------------------------------------------------------------------------------- transforms


def without_dim(extent: Extent, dim: int) -> Extent:
    """What one index of `dim` knows, for a function that is mapped over it; its booleans are those of that index.

    Raises MaskedSemanticsError if `dim` numbers positions: of one position by itself, nothing follows for its sample.
    """
    if extent.numbers(dim):
        raise MaskedSemanticsError(
            f"vmap would map over dimension {dim} of a masked tensor, which numbers positions of padded samples. Map "
            "over the dimension that numbers the samples; or treat padding as missing values, x.without_extent()"
        )
    return _changed(extent, lambda f: replace(f, along=(*f.along[:dim], *f.along[dim + 1 :])))


def with_samples(extent: Extent, dim: int) -> Extent:
    """What is known of a result that has `dim` more: the dimension over which a function was mapped."""
    return _changed(extent, lambda f: replace(f, along=(*f.along[:dim], SAMPLES, *f.along[dim:])))


def of_outer(output: Dense | None, argument: Dense | None, ndim: int) -> Extent | None:
    """The extent of a Jacobian of `ndim` dimensions, first those of the output, then those of the argument."""
    records = [r for r in (output, argument) if r is not None]
    if all(r.extent is None for r in records):
        return None
    padded = all(r.validity is None if r.extent is None else r.extent.is_mask for r in records)
    found: list[Factor] = []
    for record, first in ((output, True), (argument, False)):
        more: list[None] = [None] * (ndim - (0 if record is None else record.ndim))
        for f in () if record is None else factors_of(record):
            along, place = ((*f.along, *more), (..., *more)) if first else ((*more, *f.along), (*more, ...))
            found.append(Factor(along, f.there[place]))
    return extent_of(found, padded)


# ---------------------------------------------------------------------------------------------------------------- sizes


def _sizes_of(along: Along) -> list[int]:
    if not isinstance(along, (Merged, Positions)):
        return []
    return [s for size, part in along.parts for s in (size, *_sizes_of(part))]


def _with_sizes(along: Along, sizes: Iterator[int]) -> Along:
    """The same knowledge with the next of these sizes."""
    if not isinstance(along, (Merged, Positions)) or not along.parts:
        return along
    return replace(along, parts=tuple((next(sizes), _with_sizes(part, sizes)) for _, part in along.parts))


# --------------------------------------------------------------------------------------------------- files and messages

# None, ("samples",), ("positions", contiguous, from_start, parts) or ("merged", parts); parts are (size, known) each.
# Samples end with True where a join has made the dimension of samples that may lie at different places.
# Positions end with True where every sample is known to have one: files say so, messages between ranks do not, whose
# samples are others.
Plain = tuple[Any, ...] | None


def in_plain_values(extent: Extent, counts: bool = False) -> tuple[tuple[Plain, ...], ...]:
    """What each factor knows of each dimension, in plain form; with `counts`, whether every sample has a position."""
    return tuple(tuple(in_plain(along, counts) for along in alongs) for alongs in extent.known)


def in_plain(along: Along, counts: bool) -> Plain:
    if along is None:
        return None
    if isinstance(along, Samples):
        return ("samples", True) if along.apart else ("samples",)
    parts = tuple((size, in_plain(part, counts)) for size, part in along.parts)
    if isinstance(along, Merged):
        return ("merged", parts)
    known = ("positions", along.contiguous, along.from_start, parts)
    return (*known, True) if counts and along.nonempty else known


def read(plain: object) -> Along:
    """What is known of a dimension, from its plain form; tuples may be lists. Raises ValueError for anything else."""
    match plain:
        case None:
            return None
        case ("samples",):
            return SAMPLES
        case ("samples", True):
            return Samples(apart=True)
        case ("positions", bool(contiguous), bool(from_start), parts):
            return Positions(contiguous, from_start, _read_parts(parts))
        case ("positions", bool(contiguous), bool(from_start), parts, True):
            return Positions(contiguous, from_start, _read_parts(parts), nonempty=True)
        case ("merged", parts):
            return Merged(_read_parts(parts))
    raise ValueError(f"what it knows of a dimension is {plain!r}")


def _read_parts(parts: object) -> tuple[tuple[int, Along], ...]:
    if not isinstance(parts, (tuple, list)) or not all(map(_is_part, parts)):
        raise ValueError(f"the parts of a dimension of which it knows something are {parts!r}")
    return tuple((size, read(part)) for size, part in parts)


def _is_part(part: object) -> bool:
    return isinstance(part, (tuple, list)) and len(part) == 2 and type(part[0]) is int and part[0] >= 0
