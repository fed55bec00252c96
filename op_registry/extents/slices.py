"""Views that leave positions out: slices, indices, splits and windows of a dimension that numbers positions.

Data stays torch's view. Bounds from the end, ``x[:, a:-b]``, leave out the first a and the last b positions *of each
sample*; those from the front count in the batch, which is a sample's own count where samples begin at 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents.ends import batch_end, begins_with_batch, ends_with_batch, keeps_all
from op_registry.extents.factors import (
    NUMBERS,
    Extent,
    Factor,
    Positions,
    State,
    as_positions,
    factors_of,
    made_of,
    numbers_positions,
)
from op_registry.extents.follow import Outcome, for_each_result, refuse
from op_registry.records.dense import Dense
from op_registry.records.validity import as_bool, as_int8
from op_registry.rule import Run, packet_name
from op_registry.sparse.permuted import AnyRecord

_TO_THE_END = 2**62


@dataclass(frozen=True)
class Cut:
    """The part of a dimension that a view shows, as the caller wrote it.

    kept  whether the dimension is kept; otherwise the view shows the index `start`
    """

    dim: int
    start: int = 0
    stop: int = _TO_THE_END
    step: int = 1
    kept: bool = True

    @property
    def first(self) -> int:
        """How many positions it leaves out in front."""
        return 0 if known_to_hold(self.start < 0) else self.start

    @property
    def last(self) -> int:
        """How many positions it leaves out at the end."""
        return -self.stop if known_to_hold(self.stop < 0) else 0

    def of(self, size: int) -> slice:
        """The part of a dimension of this size, without negative bounds."""
        start = _bound(self.start, size)
        stop = _bound(self.stop, size)
        return slice(start, start if known_to_hold(stop < start) else stop, self.step)

    def __str__(self) -> str:
        bound = "" if self.stop >= _TO_THE_END else self.stop
        inside = f"{self.start or ''}:{bound}{'' if self.step == 1 else f':{self.step}'}" if self.kept else self.start
        return f"{self.before}{inside}]"

    @property
    def before(self) -> str:
        return f"x[{':, ' * self.dim}"


def _bound(bound: int, size: int) -> int:
    """A bound of a slice, counted from the front; sizes of graphs are compared as torch's own slices compare them."""
    if known_to_hold(bound < 0):
        return 0 if known_to_hold(bound + size <= 0) else bound + size
    return size if bound is _TO_THE_END or known_to_hold(bound >= size) else bound


def selected(call: Bound, labels: Labels, run: Run) -> Any:
    """The results of a view that shows a part of dimensions on which an extent depends."""
    record = next(iter(call.tensors.values()))
    if len(call.tensors) > 1:
        raise refuse(call, "it writes a part of a tensor")
    cuts_of = _CUTS.get(call.rule.name.removesuffix("_copy").removeprefix("unsafe_"))
    if cuts_of is None:
        raise refuse(call, "it shows a part of dimensions on which depends what is there")
    pieces = iter(cuts_of(call, record))
    results = call.applied(run)

    def of_result(result: AnyRecord, _: object) -> Any:
        factors, hides = list(factors_of(record)), False
        kept = list(record.extent.states)
        for cut in next(pieces):  # the last dimension first: those before keep their places
            for n, factor in enumerate(factors):
                factors[n], more = _cut(call, factor, cut, record.shape[cut.dim])
                hides |= more
            kept = [_state_in_part(s, cut, record.shape[cut.dim]) for s in kept]
        # (the mask of no element says nothing of positions along other dimensions)
        is_mask = record.extent.is_mask and not any(known_to_hold(size == 0) for size in result.shape)
        if hides:
            return Outcome(result, Extent(tuple(factors), is_mask, states=tuple(kept)), "part")
        return Outcome(result, made_of(factors, is_mask, states=tuple(kept)))

    return for_each_result(results, labels.results, of_result)


def hides_ends(call: Bound, record: AnyRecord) -> bool:
    """Whether the part of a record that an operator writes to, as a view shows it, ends where each sample does."""
    cuts_of = _CUTS.get(packet_name(call.op).removesuffix("_scatter"))
    cuts = cuts_of(call, record)[0] if cuts_of is not None else []
    return any(_cut(call, factor, cut, record.shape[cut.dim])[1] for cut in cuts for factor in factors_of(record))


def _dim(call: Bound, record: AnyRecord, name: str = "dim") -> int:
    return int(call[name]) % record.ndim


def _slice(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    start, end = call["start"], call["end"]
    stop = _TO_THE_END if end is None or (type(end) is int and end >= _TO_THE_END) else end
    return [[Cut(_dim(call, record), start or 0, stop, call["step"])]]


def _narrow(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    start = call["start"]
    return [[Cut(_dim(call, record), start, start + call["length"])]]


def _select(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    return [[Cut(_dim(call, record), call["index"], kept=False)]]


def _unbind(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    dim = _dim(call, record)
    return [[Cut(dim, n, kept=False)] for n in range(record.shape[dim])]


def _split(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    dim, size = _dim(call, record), call["split_size"]
    total = record.shape[dim]
    count = max(int((total + size - 1) // size), 1) if size else 1
    return [[Cut(dim, n * size, total if n == count - 1 else (n + 1) * size)] for n in range(count)]


def _split_with_sizes(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    borders = list(itertools.accumulate(call["split_sizes"], initial=0))
    return [[Cut(_dim(call, record), a, b)] for a, b in itertools.pairwise(borders)]


def _squeeze(call: Bound, record: AnyRecord) -> list[list[Cut]]:
    given = call.named.get("dim")
    dims = range(record.ndim) if given is None else [given] if isinstance(given, int) else given
    ones = {d % record.ndim for d in dims if known_to_hold(record.shape[d] == 1)}
    return [[Cut(d, 0, kept=False) for d in sorted(ones, reverse=True)]]


_CUTS: Mapping[str, Callable[[Bound, AnyRecord], list[list[Cut]]]] = {
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "unbind": _unbind,
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "squeeze": _squeeze,
}


def _cut(call: Bound, factor: Factor, cut: Cut, size: int) -> tuple[Factor, bool]:
    """A factor in the part of a dimension, and whether it hides more than the part of the mask does."""
    along, dim = as_positions(factor.along[cut.dim]), cut.dim
    if not cut.kept:
        if isinstance(along, Positions) and not known_to_hold(size == 1) and "index" in call:
            _warn_of_index(factor, along, cut)
        return _cut_as_data(factor, cut, size), False
    shown = cut.of(size)
    taken = functools.partial(_taken, dim=dim, part=shown)
    if along is None or (shown.step == 1 and known_to_hold(shown.start == 0) and known_to_hold(shown.stop == size)):
        return factor, False
    if not numbers_positions(along):
        return factor.moved_by(taken), False
    if not isinstance(along, Positions):
        raise refuse(call, f"{cut} cuts a dimension that is merged of positions and others")
    parts = _joined_parts(along, shown)
    if parts is not None:
        return factor.knowing(dim, parts).moved_by(taken), False
    if not along.contiguous:
        raise refuse(call, f"{cut} would count what lies between the positions of a sample; see masked_dispatch.align")
    # (the first position of each sample stays where it begins at the first index that is shown)
    keeps_first = along.from_start and known_to_hold(shown.start == 0) and known_to_hold(cut.stop >= 1)
    known = factor.knowing(dim, replace(along, parts=(), nonempty=along.nonempty and keeps_first))
    if known_to_hold(cut.start < 0):
        if not ends_with_batch(factor, dim):
            batch_end(f"{cut.before}-k:]", f"masked_dispatch.last(x, {dim}, k)")
        return known.moved_by(taken), False
    to_the_end = cut.stop is _TO_THE_END or known_to_hold(cut.stop >= size)
    counts = not to_the_end and known_to_hold(cut.stop >= 0)
    if not along.from_start and (counts or cut.step != 1):
        simple = counts and not cut.first and cut.step == 1
        first = f", as masked_dispatch.first(x, {dim}, {cut.stop})" if simple else ""
        raise refuse(
            call,
            f"{cut} counts from the start of the batch, where samples do not begin; masked_dispatch.first and "
            f"masked_dispatch.align(x, {dim}) count from each sample's own{first}",
        )
    length = (shown.stop - shown.start + cut.step - 1) // cut.step
    left_out = cut.first + cut.last
    ahead = slice(size if known_to_hold(left_out >= size) else left_out, size, cut.step)
    if along.from_start:
        return known.moved_by(lambda there: _taken(there, dim, ahead).narrow(dim, 0, length)), cut.last > 0

    def at_both_ends(there: Tensor) -> Tensor:
        return _taken(there, dim, ahead).narrow(dim, 0, length) & there.narrow(dim, 0, length)

    return known.moved_by(at_both_ends), True


def _state_in_part(state: State, cut: Cut, size: int) -> State:
    """A state in the part of a dimension that the data shows: of steps that were stacked, the steps there."""
    there = _cut_as_data(state.there, cut, size)
    return State(
        there, state.recurrence, next(NUMBERS) if numbers_positions(state.there.along[cut.dim]) else state.number
    )


def _cut_as_data(factor: Factor, cut: Cut, size: int) -> Factor:
    """A factor in the part of a dimension that the data shows."""
    dim, along = cut.dim, factor.along[cut.dim]
    if cut.kept:
        return factor if along is None else factor.moved_by(functools.partial(_taken, dim=dim, part=cut.of(size)))
    if factor.depends == (dim,):  # it stays, and says of one position, or sample, whether it is there
        factor = replace(factor, step=numbers_positions(along))
    rest = (*factor.along[:dim], *factor.along[dim + 1 :])
    index = 0 if along is None else cut.start
    return factor.moved(rest, lambda there: there.select(dim, index))


def _taken(there: Tensor, dim: int, part: slice) -> Tensor:
    return there[(*[slice(None)] * dim, part)]


def _warn_of_index(factor: Factor, along: Positions, cut: Cut) -> None:
    if known_to_hold(cut.start < 0):
        if not ends_with_batch(factor, cut.dim):
            from_end, count = ("-1", "") if cut.start == -1 else ("-k", ", k")
            batch_end(f"{cut.before}{from_end}]", f"masked_dispatch.last(x, {cut.dim}{count})")
    elif known_to_hold(cut.start == 0) and along.contiguous and not begins_with_batch(factor, cut.dim):
        batch_end(str(cut), f"masked_dispatch.first(x, {cut.dim})")


def _joined_parts(along: Positions, shown: slice) -> Positions | None:
    """What was known of the parts of a join that a slice gives back; None if it cuts one, or is of no join."""
    borders = list(itertools.accumulate((size for size, _ in along.parts), initial=0))
    first, last = (next((n for n, b in enumerate(borders) if known_to_hold(b == end)), None) for end in _ends(shown))
    if along.contiguous or shown.step != 1 or first is None or last is None:
        return None
    parts = along.parts[first:last]
    if len(parts) != 1:
        return replace(along, parts=parts, nonempty=False)
    only = parts[0][1]
    return only if isinstance(only, Positions) else Positions()


def _ends(shown: slice) -> tuple[int, int]:
    return shown.start, shown.stop


def unfolded(call: Bound, labels: Labels, run: Run) -> Outcome:
    """Windows of a dimension as a dimension of their own: there where all positions of the window are.

    Windows of samples are samples, each with its own positions.
    """
    record = next(iter(call.tensors.values()))
    dim, size, step = call["dimension"] % record.ndim, call["size"], call["step"]
    result: Dense = call.applied(run)
    factors, hides = [], False
    for factor in factors_of(record):
        along, there = as_positions(factor.along[dim]), factor.there
        known = (*factor.along, None)
        if along is None:
            factors.append(Factor(known, there.unsqueeze(-1)))
            continue
        if not numbers_positions(along):
            factors.append(Factor((*factor.along, along), there.unfold(dim, size, step)))
            continue
        hides = True
        if not isinstance(along, Positions) or not along.contiguous or (step != 1 and not along.from_start):
            raise refuse(call, f"its windows along dimension {dim} would not be the sample's own")
        windows = as_int8(as_bool(there).unfold(dim, size, step).all(-1))
        keeps = keeps_all(
            there, dim, windows, lambda length: (length - size) // step + 1, f"a window of {size} along dimension {dim}"
        )
        numbered = replace(along, parts=(), nonempty=along.nonempty and keeps)
        factors.append(Factor(known, windows.unsqueeze(-1)).knowing(dim, numbered))
    assert record.extent is not None
    return Outcome(result, Extent(tuple(factors), record.extent.is_mask), "part" if hides else "kept")
