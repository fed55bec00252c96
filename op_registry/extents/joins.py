"""Operands one behind the other: their positions too, end to end; and dimensions that one call makes for the next.

Parts of one sample always have the same positions, so that parts whose extents differ are different samples. Along a
dimension that the join makes, or that numbers samples, each index keeps the positions of its part. Along a dimension
of features that existed before, a position is there where every part has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.extents import states
from op_registry.extents.factors import any_along, factors_of, first_known, index_along, narrowed, where_all
from op_registry.extents.follow import (
    Outcome,
    is_all_valid,
    only_padded,
    records_of,
    refuse,
    there_says_all,
    with_factors,
)
from op_registry.extents.found import layout_of
from op_registry.extents.meetings import check_holds, combined, laid_out, met, misplaced, with_sizes
from op_registry.extents.writes import same_extent
from op_registry.records.dense import Dense
from op_registry.records.extent import (
    PREFIX,
    SAMPLES,
    SCATTERED,
    Along,
    Extent,
    Factor,
    Merged,
    Positions,
    Samples,
    extent_of,
    is_nonempty,
    is_prefix,
    made_of,
    numbers_positions,
    numbers_samples,
)
from op_registry.records.validity import as_int8, intersect
from op_registry.rule import Run
from op_registry.sparse.permuted import AnyRecord


def unsqueezed(call: Bound, labels: Labels, run: Run) -> Outcome:
    """A dimension of size 1 more."""
    record = next(iter(call.tensors.values()))
    result = call.applied(run)
    return with_new_dimension(record, result, call["dim"] % result.ndim)


def with_new_dimension(record: AnyRecord, result: AnyRecord, dim: int) -> Outcome:
    """The result, a record with a dimension of size 1 more: it numbers nothing yet, or what is by itself."""
    assert record.extent is not None
    factors = [with_new(f, dim) for f in factors_of(record)]
    kept = tuple(s.moved(with_new(s.there, dim)) for s in record.extent.states)
    return Outcome(result, made_of(factors, record.extent.is_mask, dim, kept))


def with_new(factor: Factor, dim: int) -> Factor:
    """The factor with a new dimension `dim`: a sample by itself is numbered by it, and so is a step by itself."""
    if any(map(numbers_samples, factor.along)):
        known: Along = None
    else:
        known = PREFIX if factor.step and not factor.depends else SAMPLES
    return factor.moved((*factor.along[:dim], known, *factor.along[dim:]), lambda there: there.unsqueeze(dim))


class Part:
    """An operand of a join: its factors, with the result's dimensions, and its size along the join."""

    def __init__(self, record: AnyRecord, dim: int, stacked: bool) -> None:
        self.record = record
        self.size: int = 1 if stacked else record.shape[dim]
        own = factors_of(record)
        steps = () if record.extent is None else record.extent.states
        self.factors = [with_new(f, dim) for f in own] if stacked else list(own)
        self.states = [s.moved(with_new(s.there, dim)) for s in steps] if stacked else list(steps)


def joined(call: Bound, labels: Labels, run: Run) -> Any:
    """The result of a join."""
    result = call.applied(run)
    records = records_of(call)
    stacked = bool(getattr(call.rule.dims, "stacked", False))
    dim = call["dim"] % result.ndim
    parts = [Part(r, dim, stacked) for r in records.values() if stacked or r.ndim == result.ndim]
    is_new = stacked or _is_new(parts, dim)
    found, kept = states.stacked([(p.states, p.size) for p in parts], dim, is_new, call.rule.name)
    factors, keeps = _factors(parts, dim, is_new, call.rule.name)
    grows = bool(found) or not keeps
    all_there = only_padded(records)
    outcome = with_factors(result, [*factors, *found], all_there, grows, whole=there_says_all(records))
    return states.with_states(outcome, kept)


def _is_new(parts: Sequence[Part], dim: int) -> bool:
    """Whether the calls before a join have made its dimension for it.

    A plain part does not know that. Beside one, the last dimension is taken for features, which a step has in common
    with a state or with the time.
    """
    new = [part.record.extent.new for part in parts if part.record.extent is not None]
    if any(d != dim for d in new) or any(not known_to_hold(part.size == 1) for part in parts):
        return False
    return bool(new) and (len(new) == len(parts) or dim != parts[0].record.ndim - 1)


def _factors(parts: Sequence[Part], dim: int, is_new: bool, name: str) -> tuple[list[Factor], bool]:
    """The factors of a join, and whether what is valid in its parts is there."""
    if len(parts) == 1 and not is_new:
        return parts[0].factors, True
    knowns = [f.along[dim] for part in parts for f in part.factors]
    others = [[f for f in part.factors if f.along[dim] is None] for part in parts]
    if any(map(numbers_positions, knowns)):
        return [*combined(others, name), *_behind_one_another(parts, dim, is_new)], False
    if any(along is not None for along in knowns):
        return _each_with_its_own(parts, dim, of_steps=False), False
    if same_extent([part.record for part in parts]):
        return parts[0].factors, True
    return (_each_with_its_own(parts, dim, of_steps=True) if is_new else list(combined(others, name))), False


def _behind_one_another(parts: Sequence[Part], dim: int, is_new: bool) -> list[Factor]:
    """The factors of parts whose positions, or samples, lie end to end along `dim`."""
    in_order = [[f for f in part.factors if numbers_positions(f.along[dim])] for part in parts]
    by_sample = [[f for f in part.factors if numbers_samples(f.along[dim])] for part in parts]
    found = [_end_to_end(parts, in_order, dim, is_new)]
    return [*found, _index_by_index(parts, by_sample, dim, ())] if any(by_sample) else found


def _each_with_its_own(parts: Sequence[Part], dim: int, of_steps: bool) -> list[Factor]:
    """The factors of parts of which each keeps its positions; of those that number none, the parts may be steps."""
    found: list[Factor] = []
    for kind in dict.fromkeys(f.positions for part in parts for f in part.factors):
        each = [[f for f in part.factors if f.positions == kind] for part in parts]
        found += _steps(parts, each, dim) if of_steps and not kind else [_index_by_index(parts, each, dim, kind)]
    return found


def _index_by_index(
    parts: Sequence[Part], factors: Sequence[Sequence[Factor]], dim: int, kind: Sequence[int]
) -> Factor:
    """The factor of parts each of which keeps its positions, along the dimensions of `kind`.

    A part without an extent is there, along positions, wherever another part is, and as a sample.
    """
    given = [f for each in factors for f in each]
    somewhere: Tensor | None = None
    if kind:
        somewhere = reduce(_either, [any_along(where_all(each), (dim,)) for each in factors if each])
    there = laid_out(_booleans(parts, factors, somewhere), dim, given[0].there)
    along = [_met([f.along[d] for f in given if f.along[d] is not None]) for d in range(there.ndim)]
    places_differ = any(not is_prefix(f.along[d]) for f in given for d in kind)
    along[dim] = Samples(apart=places_differ)
    return Factor(tuple(along), narrowed(there, along))


def _either(a: Tensor, b: Tensor) -> Tensor:
    return as_int8(a | b)


def _met(knowns: Sequence[Along]) -> Along:
    return reduce(met, knowns) if knowns else None


def _booleans(
    parts: Sequence[Part], factors: Sequence[Sequence[Factor]], without: Tensor | None
) -> list[tuple[Tensor | None, int]]:
    """The boolean of each part, and its size; of a part without factors, `without`."""
    return [(where_all(each) if each else without, part.size) for part, each in zip(parts, factors, strict=True)]


def _steps(parts: Sequence[Part], factors: Sequence[Sequence[Factor]], dim: int) -> list[Factor]:
    """The factors of parts that say only whether the sample is there: it is there where any step is."""
    given = [f for each in factors for f in each]
    there = laid_out(_booleans(parts, factors, None), dim, given[0].there)
    along = [_met([f.along[d] for f in given if f.along[d] is not None]) for d in range(there.ndim)]
    sample = Factor(tuple(along), any_along(there, (dim,)), any(f.step for f in given))
    along[dim] = layout_of(there, dim)
    return [sample, Factor(tuple(along), there)]


def _end_to_end(parts: Sequence[Part], factors: Sequence[Sequence[Factor]], dim: int, is_new: bool) -> Factor:
    """The factor of parts whose positions lie end to end along `dim`."""
    given = [f for each in factors for f in each]
    there = laid_out(_booleans(parts, factors, _somewhere(factors, dim)), dim, given[0].there)
    along = list(first_known(given))
    # (what is joined one position after another, as a loop over positions leaves it, are the steps of samples)
    one_by_one = all(factors) and all(known_to_hold(part.size == 1) for part in parts)
    along[dim] = (
        layout_of(there, dim) if is_new or one_by_one else _positions(factors, [part.size for part in parts], dim)
    )
    return Factor(tuple(along), narrowed(there, along))


def _somewhere(factors: Sequence[Sequence[Factor]], dim: int) -> Tensor | None:
    """Where a part without an extent is there: where another part is, if more than `dim` says so; None: everywhere."""
    several = [f for each in factors for f in each if len(f.positions) > 1]
    return reduce(_either, [any_along(f.there, (dim,)) for f in several]) if several else None


def _positions(factors: Sequence[Sequence[Factor]], sizes: Sequence[int], dim: int) -> Positions:
    """What is known along the dimension of a join: gaps, unless all parts before the last are there everywhere."""
    with_elements = [each for each, size in zip(factors, sizes, strict=True) if not known_to_hold(size == 0)]
    if len(with_elements) == 1 and len(with_elements[0]) == 1:
        alone = with_elements[0][0].along[dim]
        if isinstance(alone, Positions):
            return alone
    knowns = [f.along[dim] for each in factors for f in each]
    whole_before = not any(factors[:-1])
    contiguous = whole_before and all(isinstance(k, Positions) and k.is_prefix for k in knowns)
    parts = tuple((size, _one([f.along[dim] for f in each])) for each, size in zip(factors, sizes, strict=True))
    # (every sample has a position that one part has for all of them)
    by_one = all(len(f.positions) == 1 for each in factors for f in each)
    nonempty = by_one and any(len(each) < 2 and all(is_nonempty(f.along[dim]) for f in each) for each in with_elements)
    return Positions(contiguous, contiguous, parts, nonempty)


def _one(knowns: Sequence[Along]) -> Along:
    if not knowns:
        return None
    if len(knowns) == 1 and not isinstance(knowns[0], Merged):
        return knowns[0]
    return SCATTERED


# ---------------------------------------------------------------------------------------------------------- other sizes


def reshaped(call: Bound, run: Run) -> Any:
    """The same elements in other sizes: what is merged can be split again."""
    record = next(iter(call.tensors.values()))
    result = call.applied(run)
    if result is record:
        return result
    for own, what in [found for f in factors_of(record) for found in misplaced(f, record.shape, result.shape)]:
        check_holds(own, refuse(call, f"{what}, where samples do not begin at one; see masked_dispatch.align"))
    new = None if _splits_one(record) else _inserted(record.shape, result.shape)
    shape = record.shape if new is None else (*record.shape[:new], 1, *record.shape[new:])
    if new is not None and _same_sizes(shape, result.shape):
        return with_new_dimension(record, result, new)

    def moved(factor: Factor) -> Factor:
        return with_sizes(factor if new is None else with_new(factor, new), shape, result.shape)

    factors = [moved(f) for f in factors_of(record)]
    kept = [s.moved(moved(s.there)) for s in record.extent.states]
    return states.with_states(with_factors(result, factors, record.extent.is_mask, grows=False), kept)


def _splits_one(record: AnyRecord) -> bool:
    """Whether a dimension is merged of others, of which one has size 1 and matters: sizes may split it off again."""
    assert record.extent is not None
    merged = [a for along in record.extent.known for a in along if isinstance(a, Merged)]
    return any(part is not None and known_to_hold(size == 1) for a in merged for size, part in a.parts)


def _inserted(shape: Sequence[int], size: Sequence[int]) -> int | None:
    """A dimension of size 1 that sizes have and a shape has not: any, if it is the only difference, or the first."""
    ones = [d for d, n in enumerate(size) if known_to_hold(n == 1)]
    if len(size) == len(shape) + 1:
        for d in ones:
            if _same_sizes((*size[:d], *size[d + 1 :]), shape):
                return d
    return 0 if ones[:1] == [0] and not (shape and known_to_hold(shape[0] == 1)) else None


def _same_sizes(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) == len(b) and all(known_to_hold(m == n) for m, n in zip(a, b, strict=True))


# ----------------------------------------------------------------------------------- tensors that become samples of one


def of_lengths(batch: Dense, lengths: Tensor, batch_first: bool) -> Dense:
    """Sequences with padding behind them, (B, T, ...) or (T, B, ...): valid where they are and there.

    lengths  int64 (B): how many positions each sequence has, at least one
    """
    samples, steps = (0, 1) if batch_first else (1, 0)
    there = index_along(steps, batch.shape[steps], 2, batch.device) < lengths.unsqueeze(steps)
    along: list[Along] = [None] * batch.ndim
    along[samples], along[steps] = SAMPLES, Positions(nonempty=True)
    factor = Factor(tuple(along), as_int8(there.reshape(*there.shape, *[1] * (batch.ndim - 2))))
    return Dense(batch.data, intersect(batch.validity, factor.there), extent_of([factor], batch.validity is None))


def extent_of_samples(records: Sequence[AnyRecord], name: str) -> Extent | None:
    """The extent of records of one shape, stacked in a new dimension 0 that numbers samples; `name` is the caller's.

    A record without an extent is there everywhere. Raises MaskedSemanticsError if records know which positions are
    there by different dimensions.
    """
    given = [[f.moved((SAMPLES, *f.along), lambda t: t.unsqueeze(0)) for f in factors_of(r)] for r in records]
    return _extent_of_rows(records, given, [1] * len(records), name)


def extent_of_rows(records: Sequence[AnyRecord], name: str) -> Extent | None:
    """The extent of records whose rows, in dimension 0, lie one behind the other; as above.

    Raises MaskedSemanticsError if their rows are positions, too.
    """
    given = [factors_of(record) for record in records]
    for record, factors in zip(records, given, strict=True):
        if any(numbers_positions(factor.along[0]) for factor in factors):
            raise MaskedSemanticsError(
                f"{name}: dimension 0 of a tensor of shape {tuple(record.shape)} numbers the positions of its samples, "
                "and those of several tensors would become one sample's. Move the samples there, x.transpose(0, 1); or "
                "pass x.without_extent(), in which padding counts as missing."
            )
    return _extent_of_rows(records, given, [record.shape[0] for record in records], name)


def _extent_of_rows(
    records: Sequence[AnyRecord], given: Sequence[Sequence[Factor]], rows: Sequence[int], name: str
) -> Extent | None:
    padded = all(is_all_valid(r) if r.extent is None else r.extent.is_mask for r in records)
    kinds = {tuple(factor.depends for factor in factors) for factors in given if factors}
    if len(kinds) > 1:
        raise MaskedSemanticsError(
            f"{name}: tensors of shape {tuple(records[0].shape)} know by different dimensions which of their positions "
            "are there. Pass x.without_extent(), in which padding counts as missing."
        )
    if not kinds:
        return None
    number = len(next(iter(kinds)))
    factors = [_rows_end_to_end([f[n] if f else None for f in given], rows) for n in range(number)]
    return extent_of(factors, padded)


def _rows_end_to_end(factors: Sequence[Factor | None], rows: Sequence[int]) -> Factor:
    first, *others = [factor for factor in factors if factor is not None]
    along = first.along
    for other in others:
        along = tuple(map(met, along, other.along))
    parts = [(None if factor is None else factor.there, size) for factor, size in zip(factors, rows, strict=True)]
    return Factor((SAMPLES, *along[1:]), laid_out(parts, 0, first.there))
