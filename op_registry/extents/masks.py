"""Extents under operations on masks by hand: another mask, accumulation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.combine import combined
from op_registry.extents.factors import Along, Extent, Factor, Merged, Positions, extent_of, factors_of
from op_registry.records.dense import Dense
from op_registry.records.validity import intersect


def under(record: Dense, data: Tensor, validity: Tensor | None, other: Dense | None = None) -> Dense:
    """`data` under the record's mask and `validity`; its extent is the record's, and what `other` has of it."""
    found = intersect(record.validity, validity)
    if record.extent is None and (other is None or other.extent is None):
        return Dense(data, found)
    factors = factors_of(record)
    if other is not None and other.extent is not None:
        factors = combined([factors, _led(other, record.ndim)], "mask_like")
    unchanged = record.extent is not None and record.extent.is_mask and found is record.validity
    return Dense(data, found, extent_of(factors, is_mask=unchanged))


def _led(record: Dense, ndim: int) -> list[Factor]:
    """The factors of a record with dimensions of size 1 in front."""
    lead = (None,) * (ndim - record.ndim)
    return [Factor((*lead, *f.along), f.there[lead]) for f in factors_of(record) if f.there is not None]


def united(total: Dense, records: Sequence[Dense]) -> Dense:
    """A sum of what is valid: a position is there where one operand's is."""
    extents: list[Extent | None] = [record.extent for record in records]
    if all(extent is None for extent in extents) or any(e is None for e in extents):
        return total  # a tensor without an extent is there everywhere
    if all(extent is extents[0] for extent in extents) and all(r.validity is records[0].validity for r in records):
        return Dense(total.data, total.validity, extents[0])
    given = [factors_of(record) for record in records]
    first = given[0]
    if not any(given):  # reduced from samples, of which some are empty
        return Dense(total.data, total.validity, extent_of((), all(e is not None and e.is_mask for e in extents)))
    if any(len(factors) != 1 or factors[0].along != first[0].along for factors in given) or len(first) != 1:
        raise MaskedSemanticsError(
            "accumulate: its operands know by different dimensions which of their positions are there. Sum tensors "
            "with one kind of padding, or x.without_extent()."
        )
    there = first[0].there
    for factors in given[1:]:
        other = factors[0].there
        there = other if there is None or other is None else there | other
    return Dense(total.data, total.validity, extent_of([Factor(known_of_union(first[0].along), there)], is_mask=False))


def known_of_union(along: Sequence[Along]) -> tuple[Along, ...]:
    """What is known where one boolean or another of these is: the first positions, but no longer positions in a row."""
    return tuple(map(_of_union, along))


def _of_union(along: Along) -> Along:
    if isinstance(along, Merged):
        return Merged(tuple((size, _of_union(part)) for size, part in along.parts))
    if isinstance(along, Positions) and not along.is_prefix:
        parts = tuple((size, _of_union(part)) for size, part in along.parts)
        return Positions(contiguous=False, from_start=along.from_start, parts=parts)
    return along
