"""Extents under operations on masks by hand: another mask, accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.combine import combined
from op_registry.extents.factors import confined, conjunction, factors_of, first_known, where_all, with_extent
from op_registry.extents.follow import is_all_valid
from op_registry.records.dense import Dense
from op_registry.records.extent import Along, Extent, Factor, Merged, Positions, extent_of, maybe_empty, without_order
from op_registry.records.validity import as_int8, intersect, is_same_memory
from op_registry.sparse.permuted import AnyRecord, shown


def under(record: Dense, data: Tensor, validity: Tensor | None, other: AnyRecord | None = None) -> Dense:
    """`data` under the record's mask and `validity`; its extent is the record's, and what `other` has of it."""
    found = intersect(record.validity, validity)
    unchanged = record.extent is not None and record.extent.is_mask and found is record.validity
    return Dense(data, found, extent_under(record, other, unchanged))


def extent_under(record: AnyRecord, other: AnyRecord | None = None, unchanged: bool = False) -> Extent | None:
    """The extent of a record under another mask: its own, and what `other` has of it.

    unchanged  whether what is valid is still all that is there
    """
    if record.extent is None and (other is None or other.extent is None):
        return None
    factors = factors_of(record)
    if other is not None and other.extent is not None:
        factors = combined([factors, _led(other, record.ndim)], "mask_like")
    return extent_of(factors, is_mask=unchanged)


def _led(record: AnyRecord, ndim: int) -> list[Factor]:
    """The factors of a record with dimensions of size 1 in front."""
    lead = (None,) * (ndim - record.ndim)
    return [Factor((*lead, *f.along), f.there[lead]) for f in factors_of(record)]


def of_target(target: AnyRecord, source: AnyRecord) -> list[Factor]:
    """What a source that takes its shape from `target` takes of its extent: the factors of dimensions whose positions
    the target numbers and the source does not.
    """
    lead = target.ndim - source.ndim
    own = {d + lead for factor in factors_of(source) for d in factor.depends}
    return [f for f in factors_of(target) if f.positions and not own.issuperset(f.positions)]


def placed_as(record: AnyRecord, other: AnyRecord) -> Any:
    """The record, valid where it was and a position of `other` is there: its extent, and what `other` has of it."""
    if other.extent is None or not other.extent.factors:
        return record
    is_mask = is_all_valid(record) if record.extent is None else record.extent.is_mask
    found = combined([factors_of(record), _led(other, record.ndim)], "what is computed of a padded batch")
    return with_extent(confined(record, conjunction(found)), extent_of(found, is_mask))


def united_in_groups(record: AnyRecord, dim: int, numbers: Tensor, groups: int) -> Dense:
    """bool with the groups along `dim`, whose index n is in group `numbers[n]`: there where an index of the group is.

    Numbers beyond the groups are in none.
    """
    factors = factors_of(record)
    gone = [f for f in factors if f.along[dim] is not None]
    shape = [groups if d == dim else size for d, size in enumerate(record.shape)]
    found = [f for f in factors if f.along[dim] is None]
    if gone:
        there = where_all(gone)
        rows = there.new_zeros([groups + 1 if d == dim else size for d, size in enumerate(there.shape)])
        rows = rows.to(torch.int64).index_add(dim, numbers, there.to(torch.int64)).narrow(dim, 0, groups)
        along = gone[0].along if len(gone) == 1 else tuple(map(without_order, first_known(gone)))
        found.append(Factor(tuple(map(maybe_empty, known_of_union(along))), as_int8(rows > 0)))
    data = torch.ones((), dtype=torch.bool, device=record.device).expand(shape)
    return Dense(data, conjunction(found), extent_of(found, is_mask=bool(found)))


def united(total: AnyRecord, records: Sequence[AnyRecord]) -> Any:
    """A sum of what is valid: a position is there where one operand's is."""
    extents: list[Extent | None] = [r.extent if r.extent is not None and r.extent.factors else None for r in records]
    if all(extent is None for extent in extents) or any(e is None for e in extents):
        return total  # a tensor without an extent is there everywhere
    if all(extent is extents[0] for extent in extents) and same_mask(records):
        return with_extent(total, extents[0])
    given = [factors_of(record) for record in records]
    kinds = {tuple(tuple(map(maybe_empty, factor.along)) for factor in factors) for factors in given}
    first = given[0]
    if len(kinds) > 1 or len(first) != 1:
        raise MaskedSemanticsError(
            "accumulate: its operands know by different dimensions which of their positions are there. Sum tensors "
            "with one kind of padding, or x.without_extent()."
        )
    there = first[0].there
    for factors in given[1:]:
        there = there | factors[0].there
    known = known_of_union(first_known([factors[0] for factors in given]))
    return with_extent(total, extent_of([Factor(known, there)], is_mask=False))


def same_extent(records: Sequence[AnyRecord]) -> bool:
    """Whether records have the very same extent. (Values of booleans are not compared, as a graph could not.)"""
    first = records[0].extent
    if first is None or first.states:
        return False
    for record in records[1:]:  # (loops, as this is asked for each call of several operands)
        extent = record.extent
        if extent is first:
            continue
        if extent is None or extent.number != first.number or extent.states:
            return False
        for mine, other in zip(extent.factors, first.factors, strict=True):
            if mine.said is not other.said:
                return False
    return all(factor.said is not None for factor in first.factors) or same_mask(records)


def same_mask(records: Sequence[AnyRecord]) -> bool:
    """Whether records are known to be valid at the same places."""
    return all(_same_mask(record, records[0]) for record in records[1:])


def _same_mask(a: AnyRecord, b: AnyRecord) -> bool:
    if isinstance(a, Dense) or isinstance(b, Dense):
        return isinstance(a, Dense) and isinstance(b, Dense) and is_same_memory(a.validity, b.validity)
    (x, _), (y, _) = shown(a), shown(b)
    return x.pattern.same_as(y.pattern) and x.values.validity is None and y.values.validity is None


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
