"""What becomes of an extent under another mask, in a sum of what is valid, and where a part of a tensor is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import confined, conjunction, factors_of, first_known, where_all, with_extent
from op_registry.extents.follow import is_all_valid
from op_registry.extents.meetings import both as where_both
from op_registry.extents.meetings import combined
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    NUMBERS,
    SAMPLES,
    SCATTERED,
    Along,
    Extent,
    Factor,
    Merged,
    Positions,
    State,
    extent_of,
    made_of,
    maybe_empty,
    numbers_positions,
    without_order,
)
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


# ------------------------------------------------------------------------------- the part of a tensor that a view shows


@dataclass(frozen=True)
class Region:
    """The part of a tensor that a view of its memory shows.

    dims   for each dimension of the tensor, that of the view; None: the view shows one index of it
    parts  for each dimension of the tensor, the indices that the view shows
    whole  for each dimension of the tensor, whether these are all
    ndim   number of dimensions of the view
    """

    dims: tuple[int | None, ...]
    parts: tuple[slice, ...]
    whole: tuple[bool, ...]
    ndim: int


def region_of(data: Tensor, view: Tensor) -> Region | None:
    """The part of `data` that `view` shows; None if its dimensions are not those of `data`, as after a merge."""
    starts: list[int] = [0] * data.ndim
    found: list[int | None] = [None] * data.ndim
    parts = [slice(0, 1)] * data.ndim
    by_stride = sorted((d for d in range(data.ndim) if data.shape[d] != 1), key=data.stride, reverse=True)
    if any(data.stride(d) == 0 for d in by_stride):
        return None
    offset = int(view.storage_offset() - data.storage_offset())
    for d in by_stride:
        starts[d], offset = divmod(offset, data.stride(d))
        if not 0 <= starts[d] < data.shape[d]:
            return None
        parts[d] = slice(starts[d], starts[d] + 1)
    for v in sorted(range(view.ndim), key=view.stride, reverse=True):
        size, stride = view.shape[v], view.stride(v)
        if size == 1:
            alike = [d for d in range(data.ndim) if found[d] is None and data.stride(d) == stride]
        else:
            alike = [d for d in by_stride if found[d] is None and _steps_within(data, d, starts[d], size, stride)]
        if alike:
            d = alike[0]
            step = max(stride // data.stride(d), 1) if data.stride(d) else 1
            found[d], parts[d] = v, slice(starts[d], starts[d] + (size - 1) * step + 1, step)
        elif size != 1 and stride != 0:
            return None
    whole = tuple(
        part == slice(0, size) or part == slice(0, size, 1) for part, size in zip(parts, data.shape, strict=True)
    )
    return None if offset else Region(tuple(found), tuple(parts), whole, view.ndim)


def _steps_within(data: Tensor, dim: int, start: int, size: int, stride: int) -> bool:
    step, rest = divmod(stride, data.stride(dim))
    return step > 0 and rest == 0 and start + (size - 1) * step < data.shape[dim]


def extent_in(extent: Extent, region: Region) -> Extent | None:
    """The extent of the part of a tensor that a region is."""
    factors = [f for factor in extent.factors if (f := _in_view(factor, region)).depends]
    states = tuple(s.moved(_in_view(s.there, region)) for s in extent.states)
    return made_of(factors, extent.is_mask, states=states)


def _in_view(factor: Factor, region: Region) -> Factor:
    along: list[Along] = [None] * region.ndim
    for v, whole, known in zip(region.dims, region.whole, factor.along, strict=True):
        if v is not None:
            along[v] = known if whole else _in_part(known)
    return Factor(tuple(along), None if factor.said is None else _to_view(factor.there, region), factor.step)


def there_in(factors: Sequence[Factor], region: Region) -> Tensor | None:
    """Which positions of a region are there, in the dimensions of the view."""
    return conjunction([Factor((None,) * region.ndim, _to_view(f.there, region)) for f in factors])


def _in_part(along: Along) -> Along:
    """What is known of a dimension in some of its indices: a sample's first positions begin the part too."""
    return Positions(along.contiguous, along.from_start) if isinstance(along, Positions) else without_order(along)


def _to_view(there: Tensor, region: Region) -> Tensor:
    """A boolean of the tensor, in the dimensions of the view."""
    there = there[
        tuple(part if size != 1 else slice(None) for part, size in zip(region.parts, there.shape, strict=True))
    ]
    order = sorted((d for d, v in enumerate(region.dims) if v is not None), key=lambda d: region.dims[d] or 0)
    rest = [d for d, v in enumerate(region.dims) if v is None]
    sizes = {region.dims[d]: there.shape[d] for d in order}
    return there.permute([*order, *rest]).reshape([sizes.get(v, 1) for v in range(region.ndim)])


def written(
    base: Sequence[Factor], shape: Sequence[int], region: Region, old: Sequence[Factor], new: Sequence[Factor]
) -> tuple[Factor, ...] | None:
    """The factors of a tensor of this shape, where a write to a region has changed the region's from `old` to `new`.

    None if nothing says which dimension numbers positions.
    """
    found = list(base)
    for factor in new:
        if any(_is_same(factor, other) for other in old):
            continue
        placed = _placed(base, shape, region, factor)
        if placed is None:
            return None
        same = next((n for n, f in enumerate(found) if f.depends == placed.depends), None)
        if same is None:
            found.append(placed)
        else:
            both = where_both(found[same], placed)
            for d, along in enumerate(placed.along):
                both = both if region.whole[d] else both.knowing(d, along)
            found[same] = both
    return tuple(found)


def new_states(before: Extent | None, after: Extent | None) -> list[State]:
    """The states that `after` is and `before` was not."""
    known = {s.number for s in before.states} if before is not None else set()
    return [s for s in after.states if s.number not in known] if after is not None else []


def states_written(
    base: Sequence[State], shape: Sequence[int], region: Region, new: Sequence[State]
) -> tuple[tuple[State, ...], list[Factor]]:
    """The states of a tensor, and the factors of those of which it has several steps, after a write to a region."""
    states, there = list(base), []
    for state in new:
        placed = _placed((), shape, region, state.there, several=True)
        if placed is None:  # (a dimension of the view is none of the tensor)
            continue
        n = next((n for n, s in enumerate(states) if s.recurrence == state.recurrence), None)
        if n is None:
            states.append(State(placed, state.recurrence, state.number))
        elif states[n].there.depends == placed.depends:
            known = where_both(states[n].there, placed)
            is_same = states[n].number == state.number
            if not is_same and state.recurrence is None:
                raise MaskedSemanticsError(
                    "states that compiled regions have returned are written to one buffer, and it is not known outside "
                    "of these whether they are steps of one recurrence. Compile the whole loop; or write "
                    "h.without_extent(), and say then what is there, masked_dispatch.padded."
                )
            states[n] = State(known, state.recurrence, state.number if is_same else next(NUMBERS))
            there += [] if is_same else [known]
    return tuple(states), there


def without_region(factor: Factor, region: Region) -> Factor:
    """A factor of a tensor, of which a region is there everywhere."""
    there = factor.there.clone()
    there[tuple(p if a is not None else slice(None) for p, a in zip(region.parts, factor.along, strict=True))] = 1
    cut = any(numbers_positions(a) and not whole for a, whole in zip(factor.along, region.whole, strict=True))
    return Factor(tuple(map(without_order, factor.along)) if cut else factor.along, there)


def are_same(a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    """Whether these factors, each with its boolean, say the same."""
    return len(a) == len(b) and all(any(_is_same(x, y) for y in b) for x in a)


def _is_same(a: Factor, b: Factor) -> bool:
    return a.depends == b.depends and (a.there is b.there or torch.equal(a.there, b.there))


def _placed(
    base: Sequence[Factor], shape: Sequence[int], region: Region, factor: Factor, several: bool = False
) -> Factor | None:
    """A factor of a region, of the whole tensor: outside of the region, everything is there.

    several  whether several dimensions may number the positions of what says only whether a sample is there
    """
    if any(known is not None and v not in region.dims for v, known in enumerate(factor.along)):
        return None
    # (if it shows all of the tensor, it is a dimension that the view does not have that one sample, or step, numbers)
    whole = [v is not None for v in region.dims] if all(region.whole) else region.whole
    along: list[Along] = []
    cut = []
    for d, v in enumerate(region.dims):
        known = None if v is None else factor.along[v]  # (where everything is there, samples are contiguous from 0)
        along.append(known if whole[d] else SAMPLES if known is None else _with_part(base, d, shape[d], region, known))
        cut += [d] if known is None and not whole[d] else []
    # (of a sample by itself, it is the sample that is cut)
    if not factor.positions and (factor.depends or factor.step):  # it says whether the sample is there, at positions
        numbering = [d for d in cut if any(numbers_positions(f.along[d]) for f in base)] or cut
        if len(numbering) > 1 and not several:
            return None
        for d in numbering:
            along[d] = SCATTERED
    return Factor(tuple(along), _everywhere_but(factor.there, along, shape, region))


def _everywhere_but(there: Tensor, along: Sequence[Along], shape: Sequence[int], region: Region) -> Tensor:
    """A boolean of a tensor that is `there` in a region, and holds elsewhere."""
    found = there.new_ones([1 if known is None else size for known, size in zip(along, shape, strict=True)])
    part = found[tuple(p if known is not None else slice(None) for p, known in zip(region.parts, along, strict=True))]
    order = [v for v in region.dims if v is not None]
    moved = there.permute([*order, *(v for v in range(region.ndim) if v not in order)])
    sizes = iter(moved.shape)
    part.copy_(moved.reshape([1 if v is None else next(sizes) for v in region.dims]))
    return found


def _with_part(base: Sequence[Factor], dim: int, size: int, region: Region, known: Along) -> Along:
    """What is known of a dimension in a part of which positions are written: as after a join of the parts."""
    part = region.parts[dim]
    if not isinstance(known, Positions) or part.step not in (None, 1):
        return without_order(known)
    before = next((f.along[dim] for f in base if numbers_positions(f.along[dim])), None)
    pieces = before.parts if isinstance(before, Positions) and before.parts else ((size, before),)
    found: list[tuple[int, int, Along]] = [(part.start, part.stop - part.start, known)]
    start = 0
    for length, along in pieces:
        for first, stop in ((start, min(start + length, part.start)), (max(start, part.stop), start + length)):
            if stop > first:
                found.append((first, stop - first, along if stop - first == length else _in_part(along)))
        start += length
    found.sort(key=lambda piece: piece[0])
    return Positions(False, False, tuple((length, along) for _, length, along in found))


def explicit(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """The factors, each with a boolean that no write to the mask reaches."""
    return tuple(replace(f, said=f.there.clone()) for f in factors)
