"""An extent apart, for graphs: its booleans, the sizes that it records, and what is known without either."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from op_registry.extents.factors import Along, Extent, Factor, Merged, Positions


@dataclass(frozen=True)
class Known:
    """What is known of an extent; two extents that are equal in this differ in booleans and sizes alone.

    along   of each factor; the sizes of parts are left out (0)
    stored  whether each factor has a boolean of its own
    sizes   how many sizes its parts have
    """

    along: tuple[tuple[Along, ...], ...]
    stored: tuple[bool, ...]
    sizes: int
    is_mask: bool


def known_of(extent: Extent) -> Known:
    """All of an extent that graphs guard on."""
    left_out = itertools.repeat(0)
    along = tuple(tuple(_with_sizes(a, left_out) for a in f.along) for f in extent.factors)
    stored = tuple(f.there is not None for f in extent.factors)
    return Known(along, stored, len(sizes_in(extent)), extent.is_mask)


def booleans_of(extent: Extent) -> list[Tensor]:
    """The booleans that factors have of their own."""
    return [f.there for f in extent.factors if f.there is not None]


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
    return Extent(
        tuple(
            Factor(tuple(_with_sizes(a, sizes) for a in along), next(rest) if stored else None)
            for along, stored in zip(known.along, known.stored, strict=True)
        ),
        known.is_mask,
    )


def with_booleans(extent: Extent, change: Callable[[Tensor], Tensor]) -> Extent:
    """The same extent with other booleans."""
    factors = (f if f.there is None else replace(f, there=change(f.there)) for f in extent.factors)
    return Extent(tuple(factors), extent.is_mask)


def check_sizes(extent: Extent, shape: Sequence[int]) -> None:
    """Tell a graph that the sizes of parts make up the size of their dimension."""
    for factor in extent.factors:
        for along, size in zip(factor.along, shape, strict=True):
            if isinstance(along, Merged):
                torch._check(math.prod(s for s, _ in along.parts) == size)
            elif isinstance(along, Positions) and along.parts:
                torch._check(sum(s for s, _ in along.parts) == size)


def _sizes_of(along: Along) -> list[int]:
    if not isinstance(along, (Merged, Positions)):
        return []
    return [s for size, part in along.parts for s in (size, *_sizes_of(part))]


def _with_sizes(along: Along, sizes: Iterator[int]) -> Along:
    """The same knowledge with the next of these sizes."""
    if not isinstance(along, (Merged, Positions)) or not along.parts:
        return along
    return replace(along, parts=tuple((next(sizes), _with_sizes(part, sizes)) for _, part in along.parts))
