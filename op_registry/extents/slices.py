"""Parts of a dimension that numbers positions: slices, indices and splits; and ends of a batch, which may warn.

Data stays torch's view. Bounds from the end, ``x[:, a:-b]``, leave out the first a and the last b positions *of each
sample*; those from the front count in the batch, which is a sample's own count where samples begin at 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import TO_THE_END, Labels, Part
from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents.factors import factors_of
from op_registry.extents.follow import Outcome, for_each_result, refuse
from op_registry.records.extent import (
    NUMBERS,
    Extent,
    Factor,
    Positions,
    State,
    as_positions,
    is_prefix,
    made_of,
    numbers_positions,
)
from op_registry.records.tracing import computed_at_once, has_values, recording
from op_registry.records.validity import as_bool, kept_with
from op_registry.rule import Run
from op_registry.sparse.permuted import AnyRecord


def selected(call: Bound, labels: Labels, run: Run) -> Any:
    """The results of a view that shows a part of dimensions on which an extent depends."""
    name, record = next(iter(call.tensors.items()))
    dims = labels.operands[name]
    if len(call.tensors) > 1:
        raise refuse(call, "it writes a part of a tensor")
    cut = {p.label for parts in labels.cuts for p in parts}
    # (A diagonal of one element has no label that tells where it comes from.)
    if not cut.issuperset(a for a in dims if labels.role_of(a)) or any(None in shown for shown in labels.results):
        raise refuse(call, "it shows a part of dimensions on which depends what is there")
    results, cuts = call.applied(run), iter(labels.cuts)

    def of_result(result: AnyRecord, _: object) -> Any:
        factors, hides = list(factors_of(record)), False
        kept = list(record.extent.states)
        for part in next(cuts):  # the last dimension first: those before keep their places
            dim = dims.index(part.label)
            size = record.shape[dim]
            if not part.kept and len(labels.cuts) == 1 and not known_to_hold(size == 1):
                _warn_of_index(factors, part, dim)
            for n, factor in enumerate(factors):
                factors[n], more = _in_part(call, factor, part, dim, size)
                hides |= more
            kept = [_state_in_part(s, part, dim, size) for s in kept]
        # (the mask of no element says nothing of positions along other dimensions)
        is_mask = record.extent.is_mask and not any(known_to_hold(size == 0) for size in result.shape)
        if hides:
            return Outcome(result, Extent(tuple(factors), is_mask, states=tuple(kept)), "part")
        return Outcome(result, made_of(factors, is_mask, states=tuple(kept)))

    return for_each_result(results, labels.results, of_result)


def hides_ends(call: Bound, labels: Labels, record: AnyRecord) -> bool:
    """Whether the part of a record that an operator writes to, as a view shows it, ends where each sample does."""
    parts = [(part, part.label % record.ndim) for part in (labels.cuts or [()])[0] if isinstance(part.label, int)]
    for part, dim in parts:
        if not part.kept:
            _warn_of_index(factors_of(record), part, dim)
    return any(
        _in_part(call, factor, part, dim, record.shape[dim])[1] for part, dim in parts for factor in factors_of(record)
    )


def _in_part(call: Bound, factor: Factor, part: Part, dim: int, size: int) -> tuple[Factor, bool]:
    """A factor in the part of a dimension, and whether it hides more than the part of the mask does."""
    along = as_positions(factor.along[dim])
    if not part.kept:
        return _as_data(factor, part, dim, size), False
    if along is None or part.is_whole(size):
        return factor, False
    shown = part.of(size)
    taken = functools.partial(_taken, dim=dim, part=shown)
    if not numbers_positions(along):
        return factor.moved_by(taken), False
    if not isinstance(along, Positions):
        raise refuse(call, f"{part.written(dim)} cuts a dimension that is merged of positions and others")
    parts = _joined_parts(along, shown)
    if parts is not None:
        return factor.knowing(dim, parts).moved_by(taken), False
    if not along.contiguous:
        why = "would count what lies between the positions of a sample; see masked_dispatch.align"
        raise refuse(call, f"{part.written(dim)} {why}")
    # (the first position of each sample stays where it begins at the first index that is shown)
    keeps_first = along.from_start and known_to_hold(shown.start == 0) and known_to_hold(part.stop >= 1)
    known = factor.knowing(dim, replace(along, parts=(), nonempty=along.nonempty and keeps_first))
    if known_to_hold(part.start < 0):
        if not ends_with_batch(factor, dim):
            batch_end(f"{_before(dim)}-k:]", f"masked_dispatch.last(x, {dim}, k)")
        return known.moved_by(taken), False
    _check_count(call, along, part, dim, size)
    return known.moved_by(functools.partial(_own_part, part=part, dim=dim, size=size, along=along)), (
        part.ends_early or not along.from_start
    )


def _check_count(call: Bound, along: Positions, part: Part, dim: int, size: int) -> None:
    """Refuse bounds that count from the start of the batch, where samples do not begin."""
    to_the_end = part.stop is TO_THE_END or known_to_hold(part.stop >= size)
    counts = not to_the_end and not part.ends_early
    if along.from_start or not (counts or part.step != 1):
        return
    simple = counts and part.step == 1 and not part.left_out
    first = f", as masked_dispatch.first(x, {dim}, {part.stop})" if simple else ""
    raise refuse(
        call,
        f"{part.written(dim)} counts from the start of the batch, where samples do not begin; masked_dispatch.first "
        f"and masked_dispatch.align(x, {dim}) count from each sample's own{first}",
    )


def _own_part(there: Tensor, part: Part, dim: int, size: int, along: Positions) -> Tensor:
    """Which positions of a part are the sample's own: those that still have as many behind them as are left out."""
    shown, left_out = part.of(size), part.left_out
    length = (shown.stop - shown.start + part.step - 1) // part.step
    ahead = slice(size if known_to_hold(left_out >= size) else left_out, size, part.step)
    found = _taken(there, dim, ahead).narrow(dim, 0, length)
    return found if along.from_start else found & there.narrow(dim, 0, length)


def _state_in_part(state: State, part: Part, dim: int, size: int) -> State:
    """A state in the part of a dimension that the data shows: of steps that were stacked, the steps there."""
    number = next(NUMBERS) if numbers_positions(state.there.along[dim]) else state.number
    return State(_as_data(state.there, part, dim, size), state.recurrence, number)


def _as_data(factor: Factor, part: Part, dim: int, size: int) -> Factor:
    """A factor in the part of a dimension that the data shows."""
    along = factor.along[dim]
    if part.kept:
        return factor if along is None else factor.moved_by(functools.partial(_taken, dim=dim, part=part.of(size)))
    if factor.depends == (dim,):  # it stays, and says of one position, or sample, whether it is there
        factor = replace(factor, step=numbers_positions(along))
    rest = (*factor.along[:dim], *factor.along[dim + 1 :])
    index = 0 if along is None else part.start
    return factor.moved(rest, lambda there: there.select(dim, index))


def _taken(there: Tensor, dim: int, part: slice) -> Tensor:
    return there[(*[slice(None)] * dim, part)]


def _before(dim: int) -> str:
    return f"x[{':, ' * dim}"


def _warn_of_index(factors: Sequence[Factor], part: Part, dim: int) -> None:
    """Tell of an index at an end of the batch along a dimension that numbers positions."""
    for factor in factors:
        along = as_positions(factor.along[dim])
        if not isinstance(along, Positions):
            continue
        if known_to_hold(part.start < 0):
            if not ends_with_batch(factor, dim):
                from_end, count = ("-1", "") if part.start == -1 else ("-k", ", k")
                batch_end(f"{_before(dim)}{from_end}]", f"masked_dispatch.last(x, {dim}{count})")
        elif known_to_hold(part.start == 0) and along.contiguous and not begins_with_batch(factor, dim):
            batch_end(part.written(dim), f"masked_dispatch.first(x, {dim})")


def _joined_parts(along: Positions, shown: slice) -> Positions | None:
    """What was known of the parts of a join that a slice gives back; None if it cuts one, or is of no join."""
    borders = list(itertools.accumulate((size for size, _ in along.parts), initial=0))
    ends = (shown.start, shown.stop)
    first, last = (next((n for n, b in enumerate(borders) if known_to_hold(b == end)), None) for end in ends)
    if along.contiguous or shown.step != 1 or first is None or last is None:
        return None
    parts = along.parts[first:last]
    if len(parts) != 1:
        return replace(along, parts=parts, nonempty=False)
    only = parts[0][1]
    return only if isinstance(only, Positions) else Positions()


# ------------------------------------------------------------------------------------------------------ ends of a batch

# Called with the text of a warning; masked_dispatch shows it at the caller's line.
listeners: list[Callable[[str], None]] = []
# How often they were called.
warned = 0
# Called with the text of a warning of a window that leaves samples without any position.
emptied: list[Callable[[str], None]] = []


def batch_end(call: str, instead: str) -> None:
    """A view shows an end of the batch along a dimension that numbers positions of samples.

    call     what the caller wrote, without numbers that vary in a loop: a line is told once
    instead  what has each sample's own
    """
    global warned
    warned += 1
    text = (
        f"{call} is an end of the batch, where shorter samples have padding. {instead} takes each sample's own; "
        "x.without_extent() says that the batch's is meant."
    )
    for tell in listeners:
        tell(text)


def keeps_all(there: Tensor, dim: int, after: Tensor, count: Callable[[int], int], window: str) -> bool:
    """Whether windows leave a position to each sample that had one along `dim`; tells of those that do not.

    there  which positions a sample has, and `after`: which windows
    count  how many windows a sample of this length has

    Samples' lengths are read once for a batch, and then follow from window to window. In a graph they are unknown: it
    tells of a window of which the batch itself has only one, as in pooling over its whole size.
    """
    if count(1) > 0:
        return True
    kept = _kept(there)
    if kept is None:
        if known_to_hold(after.shape[dim] <= 1) and not known_to_hold(there.shape[dim] <= 1):
            _tell_of(window, "may have been longer than")
        return False
    shortest = kept.get(("shortest", dim))
    if shortest is None:
        lengths = there.sum(dim, dtype=torch.int64)
        positive = torch.where(lengths > 0, lengths, there.shape[dim] + 1)
        shortest = kept[("shortest", dim)] = int(positive.min()) if positive.numel() else there.shape[dim] + 1
    if shortest > there.shape[dim]:  # no sample had any
        return True
    left = count(shortest)
    if left < 1:
        _tell_of(window, "is longer than")
        return False
    follows = _kept(after)
    if follows is not None:
        follows[("shortest", dim)] = left
    return True


def hand_on(known: Tensor, mask: Tensor) -> None:
    """What is known of lengths of a boolean is known of a mask that is equal to it."""
    own, other = _kept(known), _kept(mask)
    if own is not None and other is not None:
        other.update({key: own[key] for key in list(own) if key[0] == "shortest"})


def _tell_of(window: str, than: str) -> None:
    text = (
        f"{window} {than} some samples of a padded batch, which have no position left: nothing follows for them, and a "
        "loss leaves them out. (Alone, torch raises.) Pooling over a whole sample is x.amax(dim), x.mean(dim) or "
        "adaptive pooling; else pad such samples (padding=), or leave them out."
    )
    for tell in emptied:
        tell(text)


def ends_with_batch(factor: Factor, dim: int) -> bool:
    """Whether the last index of `dim` is the last position of each sample that has any; False in a graph that does not
    know.
    """
    known = as_positions(factor.along[dim])
    if isinstance(known, Positions) and known.parts and known.parts[-1][1] is None:
        return True  # a part is joined at the end that is there everywhere
    return not is_prefix(known) and _all_have(factor, dim, -1)


def begins_with_batch(factor: Factor, dim: int) -> bool:
    """The same of the first index, and of the first position."""
    known = as_positions(factor.along[dim])
    return (isinstance(known, Positions) and known.from_start) or _all_have(factor, dim, 0)


def _all_have(factor: Factor, dim: int, index: int) -> bool:
    """Whether each sample that has positions along `dim` has the one at this index: read once."""
    there = factor.there
    return read_once(there, ("all have", dim, index), lambda t: _nobody_lacks(as_bool(t), dim, index)) or False


def _nobody_lacks(there: Tensor, dim: int, index: int) -> bool:
    return not there.shape[dim] or not bool((there.any(dim) & ~there.select(dim, index)).any())


def read_once(there: Tensor, name: tuple[object, ...], ask: Callable[[Tensor], bool]) -> bool | None:
    """The answer to a question about the values of an extent's boolean, which keeps it; None in a graph."""
    kept = _kept(there)
    if kept is None:
        return None
    found = kept.get(name)
    if found is None:
        found = kept[name] = ask(there)
    return bool(found)


def _kept(there: Tensor) -> dict[Any, Any] | None:
    """What is kept of a boolean whose values can be read; None in a graph."""
    if not computed_at_once(there) or recording() or not has_values(there):
        return None
    return {} if there.is_inference() else kept_with(there)


def differs(there: Tensor, dim: int) -> bool | None:
    """Whether a boolean differs along a dimension; None in a graph, which cannot know."""
    return read_once(there, ("differs", dim), lambda t: t.numel() > 0 and bool((t != t.narrow(dim, 0, 1)).any()))
