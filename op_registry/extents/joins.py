"""Operands one behind the other: their positions too, end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.extents.combine import combined, laid_out
from op_registry.extents.factors import (
    SAMPLES,
    SCATTERED,
    Along,
    Factor,
    Merged,
    Positions,
    conjunction,
    factors_of,
    first_known,
    narrowed,
    numbers_positions,
    where_all,
)
from op_registry.extents.follow import only_padded, records_of, there_says_all, with_factors
from op_registry.extents.masks import same_mask
from op_registry.records.dims import known_to_hold
from op_registry.records.tracing import computed_at_once, recording
from op_registry.records.validity import as_int8, unite
from op_registry.rule import Run
from op_registry.sparse.permuted import AnyRecord


def joined(call: Bound, labels: Labels, run: Run) -> Any:
    """The result of a join.

    Along a dimension on which no extent depends, extents intersect. Along others, they lie end to end, and a part
    without an extent is there, in the other dimensions, wherever another part is.
    """
    result = call.applied(run)
    records = records_of(call)
    stacked = bool(getattr(call.rule.dims, "stacked", False))
    dim = call["dim"] % result.ndim
    parts = [
        _Part(
            [_with_new(f, dim) for f in factors_of(r)] if stacked else list(factors_of(r)),
            1 if stacked else r.shape[dim],
        )
        for r in records.values()
        if stacked or r.ndim == result.ndim
    ]
    across = [[f for f in part.factors if f.along[dim] is None] for part in parts]
    steps = _steps(parts, dim)
    if steps is not None:
        across = [[f for f in factors if f.positions] for factors in across]
    found = list(combined(across, call.rule.name))
    if steps is not None:
        found.append(steps)
    in_order = [[f for f in part.factors if numbers_positions(f.along[dim])] for part in parts]
    if any(in_order):
        found.append(_end_to_end(parts, in_order, dim, positions=True))
    by_sample = [
        [f for f in part.factors if f.along[dim] is not None and not numbers_positions(f.along[dim])] for part in parts
    ]
    if any(by_sample):
        found.append(_end_to_end(parts, by_sample, dim, positions=False))
    grows = any(in_order) or any(by_sample) or not _alike(list(records.values()))
    return with_factors(result, found, only_padded(records), grows, whole=there_says_all(records))


def _alike(records: Sequence[AnyRecord]) -> bool:
    """Whether records, all of which know which of their positions are there, are known to know the same."""
    first = records[0].extent
    if first is None or not first.is_mask or len(first.factors) != 1:
        return False
    return all(r.extent is not None and r.extent.number == first.number for r in records) and same_mask(records)


class _Part:
    """An operand of a join: its factors, with the result's dimensions, and its size along the join."""

    def __init__(self, factors: list[Factor], size: int) -> None:
        self.factors, self.size = factors, size


def _with_new(factor: Factor, dim: int) -> Factor:
    return Factor((*factor.along[:dim], None, *factor.along[dim:]), factor.there.unsqueeze(dim))


def _steps(parts: Sequence[_Part], dim: int) -> Factor | None:
    """The factor of parts of size 1 that say only whether the sample is there, each another: steps of a loop."""
    if len(parts) < 2 or any(type(part.size) is not int or part.size != 1 for part in parts):
        return None
    samples = [[f for f in part.factors if not f.positions and f.along[dim] is None] for part in parts]
    given = [where_all(factors) for factors in samples if factors]
    if len(given) < 2 or not any(_differ(given[0], other) for other in given):
        return None
    depends: set[int] = {d for factors in samples for f in factors for d in f.depends}
    along = tuple(SCATTERED if d == dim else SAMPLES if d in depends else None for d in range(given[0].ndim))
    laid = [(conjunction(factors), part.size) for factors, part in zip(samples, parts, strict=True)]
    return Factor(along, laid_out(laid, dim, given[0]))


def _differ(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return False
    return not computed_at_once(a, b) or recording() or a.shape != b.shape or not torch.equal(a, b)


def _end_to_end(parts: Sequence[_Part], factors: Sequence[Sequence[Factor]], dim: int, positions: bool) -> Factor:
    """The factor of parts that lie end to end along `dim`."""
    given = [f for each in factors for f in each]
    somewhere = _somewhere(factors, dim, positions)
    laid = [(where_all(each) if each else somewhere, part.size) for each, part in zip(factors, parts, strict=True)]
    there = laid_out(laid, dim, given[0].there)
    along = list(first_known(given))
    if positions:
        along[dim] = _positions(factors, [part.size for part in parts], dim)
    return Factor(tuple(along), narrowed(there, along))


def _somewhere(factors: Sequence[Sequence[Factor]], dim: int, positions: bool) -> Tensor | None:
    """Where a part without an extent is there: where another part is, if more than `dim` says so; None: everywhere."""
    found: Tensor | None = None
    for each in factors:
        for factor in each:
            if positions and len(factor.positions) < 2:
                continue
            somewhere = as_int8(factor.there.any(dim, keepdim=True))
            found = somewhere if found is None else unite(found, somewhere)
    return found


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
    return Positions(contiguous, contiguous, parts)


def _one(knowns: Sequence[Along]) -> Along:
    if not knowns:
        return None
    if len(knowns) == 1 and not isinstance(knowns[0], Merged):
        return knowns[0]
    return SCATTERED
