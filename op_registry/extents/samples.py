"""Calls that act within each sample where they would act on the batch: flip, roll, sort, windows; and choices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels, Window
from op_registry.dimensions.movements import Moved
from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import (
    along_dim,
    any_along,
    conjunction,
    factors_of,
    first_known,
    in_front,
    index_along,
    narrowed,
    where_all,
    with_extent,
    with_size,
    within_rows,
)
from op_registry.extents.follow import (
    Outcome,
    carried_to,
    followed,
    for_each,
    for_each_result,
    only_padded,
    records_of,
    refuse,
    sizes_of,
    with_factors,
    without,
)
from op_registry.extents.found import with_count
from op_registry.extents.meetings import check_holds, combined
from op_registry.extents.slices import hand_on, keeps_all
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    Extent,
    Factor,
    Merged,
    Positions,
    Samples,
    as_positions,
    extent_of,
    is_prefix,
    maybe_empty,
    numbers_positions,
    without_order,
)
from op_registry.records.tracing import may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect
from op_registry.rule import InsideRule, Rule, Run
from op_registry.sparse.permuted import AnyRecord
from op_registry.sparse.record import NotLowered

# How windows run on samples cropped to their extent: rules of op_registry.ops, by overload; by the rule itself, of one
# that holds inside a function.
WITHIN_SAMPLES: dict[Any, Rule] = {}


# ------------------------------------------------------------------------------------------------------ one of its own


def compacted(record: Dense, dim: int) -> Dense:
    """Each sample's positions in order, from index 0 of `dim`."""
    return ends(record, dim, record.shape[dim])


def _contiguous(record: Dense, dim: int) -> Dense:
    """Each sample's positions in order: where they are, if those of each sample follow one another; else from index 0.

    Their values decide it, as what is known of them depends on how a batch came about.
    """
    gone = [f for f in factors_of(record) if f.along[dim] is not None]
    there = as_bool(where_all(gone))
    index = index_along(dim, there.shape[dim], there.ndim, there.device)
    first = torch.where(there, index, there.shape[dim]).amin(dim, keepdim=True)
    is_next = (index >= first) & (index < first + there.sum(dim, keepdim=True))
    follow, moved = (there == is_next).all(), compacted(record, dim)
    if may_be_read(follow) and not bool(follow):
        return moved
    (to_front,) = [f for f in factors_of(moved) if f.along[dim] is not None]
    factor = replace(to_front, said=as_int8(torch.where(follow, there, as_bool(to_front.there))))
    factor = factor.knowing(dim, replace(_in_front(gone, dim), from_start=False))
    mine, its = (as_bool(there if r.full_validity is None else r.full_validity) for r in (record, moved))
    extent = extent_of([*without(record, [dim]), factor], record.extent is not None and record.extent.is_mask)
    return Dense(torch.where(follow, record.data, moved.data), as_int8(torch.where(follow, mine, its)), extent)


def ends(record: Dense, dim: int, k: int, last: bool = False) -> Dense:
    """Each sample's own first (or last) k positions in order, from index 0 of `dim`: those that it has."""
    gone = [f for f in factors_of(record) if f.along[dim] is not None]
    there = conjunction(gone)
    if there is None:
        return record
    order = in_front(there, dim)
    count = there.sum(dim, keepdim=True, dtype=torch.int64)
    index = index_along(dim, k, there.ndim, there.device)
    kept, is_mask = without(record, [dim]), record.extent is not None and record.extent.is_mask
    if known_to_hold(record.shape[dim] == 0):  # no sample has a position: the k that are shown are not there

        def widened(t: Tensor) -> Tensor:
            return torch.nn.functional.pad(t, [0, 0] * (t.ndim - 1 - dim) + [0, k])

        record, order = record.map(widened), widened(order)
    if last:
        order = order.gather(dim, index + (count - k).clamp(min=0))
    else:
        order = order.narrow(dim, 0, k)
    factor = _joint(gone, as_int8(index < count)).knowing(dim, _in_front(gone, dim))
    return _gathered(record, dim, order, [*kept, factor], is_mask)


def positions(record: AnyRecord, dim: int) -> Dense:
    """int64: how many positions of the sample come before each along `dim`; of the dimensions on which that depends."""
    gone = [f for f in factors_of(record) if f.along[dim] is not None]
    there = where_all(gone)
    factor = gone[0] if len(gone) == 1 else _joint(gone, there)
    rank = (there.cumsum(dim, dtype=torch.int64) - 1).clamp(min=0)
    others = [d for d in range(record.ndim) if factor.along[d] is None]
    along = tuple(a for a in factor.along if a is not None)
    return Dense(rank.squeeze(others), there.squeeze(others), Extent((Factor(along),), is_mask=True))


def own_order(record: AnyRecord, dim: int) -> tuple[Tensor, Tensor] | None:
    """The indices along `dim` that put each sample's positions in order, from 0; and those that put them back.

    None where they are known to follow one another, or `dim` numbers none. Raises MaskedSemanticsError for a dimension
    that is merged of positions and samples.
    """
    known = [as_positions(f.along[dim]) for f in factors_of(record) if numbers_positions(f.along[dim])]
    if any(isinstance(along, Merged) for along in known):
        raise MaskedSemanticsError(
            f"dimension {dim} of a tensor of shape {tuple(record.shape)} is merged of positions and samples, so that "
            "an element's neighbours may be those of another sample: split it first, x.unflatten(dim, sizes)"
        )
    if all(isinstance(along, Positions) and along.contiguous for along in known):
        return None
    there = along_dim(record, dim)
    assert there is not None
    return in_front(there, dim).expand(record.shape), (there.cumsum(dim) - 1).clamp(min=0).expand(record.shape)


def _joint(factors: Sequence[Factor], there: Tensor) -> Factor:
    """A factor with this boolean that depends on what these depend on, in no order that is known."""
    return Factor(tuple(without_order(along) for along in first_known(factors)), there)


def _in_front(factors: Sequence[Factor], dim: int) -> Positions:
    """What is known of a dimension once each sample's positions are the first ones."""
    known = [f.along[dim] for f in factors]
    return Positions(nonempty=len(known) == 1 and isinstance(known[0], Positions) and known[0].nonempty)


def _gathered(record: Dense, dim: int, order: Tensor, factors: Sequence[Factor], is_mask: bool) -> Dense:
    """The elements at `order` of `dim`, which broadcasts to the record in other dimensions."""
    index = order.expand(with_size(record.shape, dim, order.shape[dim]))
    validity = conjunction(factors)
    if not is_mask and record.full_validity is not None:
        validity = intersect(validity, record.full_validity.gather(dim, index))
    return Dense(record.data.gather(dim, index), validity, extent_of(factors, is_mask))


def _within(record: AnyRecord, dim: int, shift: int | None) -> AnyRecord:
    """Each sample's elements along `dim` in reversed order, or `shift` positions further, round the sample's end."""
    assert record.extent is not None

    def source(rank: Tensor, count: Tensor) -> Tensor:
        return count - 1 - rank if shift is None else (rank - shift) % count.clamp(min=1)

    if not isinstance(record, Dense):
        changed = within_rows(record, dim, source) if record.extent.is_mask else None
        if changed is None:
            raise NotLowered("it works within each sample, on dense storage")
        return with_extent(changed, record.extent)  # type: ignore[no-any-return]
    there = along_dim(record, dim)
    assert there is not None
    there = as_bool(there)
    rank = there.cumsum(dim) - 1
    count = there.sum(dim, keepdim=True)
    order = in_front(there, dim)
    taken = torch.where(there, source(rank, count), 0)
    index = torch.where(there, order.gather(dim, taken), 0)
    return _gathered(record, dim, index, factors_of(record), record.extent.is_mask)


def moved(call: Bound, labels: Labels, run: Run) -> AnyRecord:
    """flip and roll: along dimensions that number positions within each sample, along others as torch does."""
    name, record = next(iter(records_of(call).items()))
    if not labels.moves or not isinstance(call.rule.dims, Moved):
        raise refuse(call, "it moves elements across dimensions that number positions or samples")
    places = [labels.operands[name].index(label) for label, _ in labels.moves]
    in_batch = [n for n, dim in enumerate(places) if not record.extent.numbers(dim)]
    if in_batch:
        factors = list(factors_of(record))
        for n in in_batch:
            dim, shift = places[n], labels.moves[n][1]
            how = functools.partial(torch.flip, dims=[dim]) if shift is None else _rolled(shift, dim)
            factors = [f if f.along[dim] is None else f.moved_by(how) for f in factors]
        alone = call.with_(**call.rule.dims.some(call.named, in_batch), **{name: with_extent(record, None)})
        record = with_extent(alone.applied(run), extent_of(factors, record.extent.is_mask))
    for dim, (_, shift) in zip(places, labels.moves, strict=True):
        if record.extent.numbers(dim):
            if any(isinstance(as_positions(f.along[dim]), Merged) for f in record.extent.factors):
                raise refuse(call, f"dimension {dim} is merged of positions and others")
            record = _within(record, dim, shift)
    return record  # type: ignore[no-any-return]


def _rolled(shift: int, dim: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.roll(shift, dim)


def sorted_to_the_front(call: Bound, labels: Labels, run: Run) -> Any:
    """Sorts: of each slice, the first n positions are there."""
    name, record = next(iter(records_of(call).items()))
    dims = labels.operands[name]
    along = [d for d in range(record.ndim) if labels.role_of(dims[d]) == "front"]
    (dim,) = along
    factors = factors_of(record)
    depends = [f for f in factors if f.along[dim] is not None]
    if not depends:  # (of the states that it is, one depends on it)
        return followed(call, labels, call.applied(run))
    results = call.applied(run)
    if len(depends) == 1 and is_prefix(depends[0].along[dim]):
        kept = list(factors)
    else:
        there = where_all(depends)
        index = index_along(dim, there.shape[dim], there.ndim, there.device)
        prefix = as_int8(index < there.sum(dim, keepdim=True, dtype=torch.int64))
        joint = _joint(depends, prefix)
        if numbers_positions(joint.along[dim]):  # (samples in another order are no positions)
            joint = joint.knowing(dim, _in_front(depends, dim))
        kept = [*without(record, [dim]), joint]
    is_mask = only_padded(records_of(call))

    def of_result(result: AnyRecord, _: Any) -> Any:
        size = result.shape[dim]
        cut = [f if f.along[dim] is None else replace(f, said=f.there.narrow(dim, 0, size)) for f in kept]
        return with_factors(result, cut, is_mask)

    return for_each_result(results, labels.results, of_result)


# -------------------------------------------------------------------------------------------------------------- windows


def windowed(call: Bound, labels: Labels, run: Run) -> Any:
    """Windows along positions: those of each sample, cropped to the positions that it has."""
    rule = WITHIN_SAMPLES.get(call.rule if isinstance(call.rule, InsideRule) else call.op)
    if rule is None:
        raise refuse(call, "its windows may read beyond the end of a sample")
    name, record = next((n, r) for n, r in records_of(call).items() if r.extent is not None)
    if any(r.extent is not None for n, r in records_of(call).items() if n != name):
        raise refuse(call, "more than one operand has positions")
    dims = labels.operands[name]
    along = [d for d in range(record.ndim) if labels.role_of(dims[d]) == "window"]
    for d in along:
        record = _croppable(call, record, d, _has_stride(call))
    record = with_extent(record, _unsure(record.extent, along))
    if record.validity is None:
        record = Dense(record.data, conjunction(factors_of(record)), record.extent)
    record = _alike_in_channels(call, labels, record, dims)
    through = [f for f in factors_of(record) if any(labels.role_of(dims[d]) == "contracted" for d in f.depends)]
    if through:
        return _through_channels(call.with_(**{name: record}), labels, name, through, run)
    padded = only_padded(records_of(call))
    result = call.with_(**{name: record}).run(rule)
    # Every window of a sample's own has a result, and no other has: where nothing is missing, that is the mask.
    return for_each(result, lambda r: _counted(r, along, padded))


def _alike_in_channels(call: Bound, labels: Labels, record: Dense, dims: Sequence[Any]) -> Dense:
    """The record, whose channels are known to have the same positions: of signals that were stacked.

    Raises MaskedSemanticsError if they have not.
    """
    found = []
    for factor in factors_of(record):
        channels = [d for d in factor.depends if labels.role_of(dims[d]) == "contracted"]
        windows = any(labels.role_of(dims[d]) == "window" for d in factor.depends)
        if windows and channels and all(isinstance(factor.along[d], Samples) for d in channels):
            any_of = any_along(factor.there, channels)
            why = "the positions that are there differ from channel to channel"
            check_holds(factor.there == any_of, refuse(call, why))
            known = [None if d in channels else along for d, along in enumerate(factor.along)]
            factor = Factor(tuple(known), narrowed(any_of, known))
        found.append(factor)
    is_mask = record.extent is not None and record.extent.is_mask
    return Dense(record.data, record.validity, extent_of(found, is_mask))


def _through_channels(call: Bound, labels: Labels, name: str, through: Sequence[Factor], run: Run) -> Any:
    """Windows where `through`, some of the factors, depend on the channels, over which the windows sum."""
    record, dims = call.tensors[name], labels.operands[name]
    if any(labels.role_of(dims[d]) == "window" for f in through for d in f.depends):
        raise refuse(call, "the positions that are there differ from channel to channel")
    others = [f for f in factors_of(record) if f not in through]
    result = windowed(call.with_(**{name: Dense(record.data, record.validity, extent_of(others, False))}), labels, run)
    kept = carried_to(through, dims, labels.results[0], sizes_of(call, labels), record, result)
    found = combined([factors_of(result), kept], call.rule.name)
    return Dense(result.data, result.validity, extent_of(found, False))


def _unsure(extent: Extent, dims: Sequence[int]) -> Extent:
    """The same extent, of samples that windows along these dimensions may leave without positions."""
    known = [tuple(maybe_empty(a) if d in dims else a for d, a in enumerate(along)) for along in extent.known]
    factors = tuple(replace(f, along=along) for f, along in zip(extent.factors, known, strict=True))
    return replace(extent, factors=factors)


def _counted(result: Dense, dims: Sequence[int], is_mask: bool) -> Dense:
    """The same result, of which it is known again whether every sample has a position along these dimensions."""
    factors = list(factors_of(result))
    for n, factor in enumerate(factors):
        for d in dims:
            if d < result.ndim and factor.along[d] is not None and may_be_read(factor.there):
                factors[n] = factor = factor.knowing(d, with_count(factor.along[d], factor.there, d))
    if is_mask and len(factors) == 1 and result.validity is not None:
        hand_on(factors[0].there, result.validity)
    return Dense(result.data, result.validity, extent_of(factors, is_mask))


def _croppable(call: Bound, record: Dense, dim: int, strided: bool) -> Dense:
    """The record with samples that are contiguous along `dim`; from index 0 where windows begin at some indices."""
    assert record.extent is not None
    known = [as_positions(f.along[dim]) for f in record.extent.factors if numbers_positions(f.along[dim])]
    if not known:
        return record
    if any(isinstance(k, Merged) for k in known):
        raise refuse(call, f"dimension {dim} is merged of positions and others")
    positions = [k for k in known if isinstance(k, Positions)]
    if len(known) == 1 and all(k.contiguous and (k.from_start or not strided) for k in positions):
        return record
    if strided or known_to_hold(record.shape[dim] == 0):
        return compacted(record, dim)
    return _contiguous(record, dim)


def _has_stride(call: Bound) -> bool:
    """Whether windows begin at other indices than each; interpolation has the reverse of a stride."""
    if call.named.get("transposed"):
        return False
    stride = call.named.get("stride", call.named.get("kernel_size", 1))
    if "scale_factors" in call or "output_size" in call:
        return True
    if isinstance(stride, int):
        return stride != 1
    return any(s != 1 for s in (list(stride) or list(call["kernel_size"])))


def in_whole_windows(call: Bound, labels: Labels, run: Run) -> Any:
    """Windows that lie in the dimension as wholes: those that lie in a sample are its own.

    Where they become a dimension of their own (unfold), windows of samples are samples, each with its own positions.
    """
    name, record = next((n, r) for n, r in records_of(call).items() if r.extent is not None)
    if any(r.extent is not None for n, r in records_of(call).items() if n != name):
        raise refuse(call, "more than one operand has positions")
    dims = labels.operands[name]
    along = {dims.index(label): window for label, window in labels.windows.items()}
    is_view = call.op._schema.returns[0].alias_info is not None
    for d, window in along.items() if not is_view else ():
        record = _croppable(call, record, d, window.step != 1)
    result, sizes = call.with_(**{name: record}).applied(run), sizes_of(call, labels)
    factors, hides = [], False
    for factor in factors_of(record):
        for d, window in along.items():
            if factor.along[d] is None:
                continue
            if not numbers_positions(factor.along[d]) and len(labels.results[0]) > record.ndim:
                factor = factor.moved_by(functools.partial(_unfolded, dim=d, window=window))
                factors.append(Factor((*factor.along, factor.along[d]), factor.there))
                break
            factor, hides = _of_windows(call, factor, d, window), True
        else:
            factors += carried_to([factor], dims, labels.results[0], sizes, record, result)
    if is_view:
        return Outcome(result, Extent(tuple(factors), record.extent.is_mask), "part" if hides else "kept")
    return with_factors(result, factors, only_padded(records_of(call)))


def _unfolded(there: Tensor, dim: int, window: Window) -> Tensor:
    return there.unfold(dim, window.size, window.step)


def _of_windows(call: Bound, factor: Factor, dim: int, window: Window) -> Factor:
    """A factor of windows along a dimension that numbers positions: there where all positions of the window are."""
    along, there = as_positions(factor.along[dim]), factor.there
    if not isinstance(along, Positions) or not along.contiguous or (window.step != 1 and not along.from_start):
        raise refuse(call, f"its windows along dimension {dim} would not be the sample's own")
    whole = as_int8(as_bool(_unfolded(there, dim, window)).all(-1))
    keeps = keeps_all(there, dim, whole, window.count, f"a window of {window.size} along dimension {dim}")
    numbered = replace(along, parts=(), nonempty=along.nonempty and keeps)
    return Factor(factor.along, whole).knowing(dim, numbered)
