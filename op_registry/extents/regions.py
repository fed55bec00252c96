"""A part of a tensor's memory, as a view of it has it: what is there in the part, and what a write to it takes away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.combine import both as where_both
from op_registry.extents.factors import conjunction
from op_registry.records.extent import (
    NUMBERS,
    SAMPLES,
    SCATTERED,
    Along,
    Extent,
    Factor,
    Positions,
    State,
    made_of,
    numbers_positions,
    without_order,
)


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


def shown(extent: Extent, region: Region) -> Extent | None:
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
    along: list[Along] = []
    # (if it shows all of the tensor, it is a dimension that the view does not have that one sample, or step, numbers)
    whole = [v is not None for v in region.dims] if all(region.whole) else region.whole
    for d, v in enumerate(region.dims):
        known = None if v is None else factor.along[v]  # (where everything is there, samples are contiguous from 0)
        along.append(known if whole[d] else SAMPLES if known is None else _with_part(base, d, shape[d], region, known))
    cut = [d for d, v in enumerate(region.dims) if not whole[d] and (v is None or factor.along[v] is None)]
    of_steps = bool(factor.depends) or factor.step  # (of a sample by itself, it is the sample that is cut)
    if (
        not factor.positions and of_steps and cut
    ):  # it says whether the sample is there, at an index that numbers positions
        numbering = [d for d in cut if any(numbers_positions(f.along[d]) for f in base)] or cut
        if len(numbering) > 1 and not several:
            return None
        for d in numbering:
            along[d] = SCATTERED
    there = factor.there.new_ones([1 if known is None else size for known, size in zip(along, shape, strict=True)])
    part = there[tuple(p if known is not None else slice(None) for p, known in zip(region.parts, along, strict=True))]
    order = [v for v in region.dims if v is not None]
    others = [v for v in range(region.ndim) if v not in order]
    sizes = iter(factor.there.permute([*order, *others]).shape)
    part.copy_(factor.there.permute([*order, *others]).reshape([1 if v is None else next(sizes) for v in region.dims]))
    return Factor(tuple(along), there)


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
