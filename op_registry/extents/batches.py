"""Tensors that become samples of one: each keeps the positions that it has, where a join would intersect them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.combine import met
from op_registry.extents.factors import (
    SAMPLES,
    Extent,
    Factor,
    extent_of,
    factors_of,
    numbers_positions,
)
from op_registry.records.dense import Dense


def extent_of_samples(records: Sequence[Dense], name: str) -> Extent | None:
    """The extent of records of one shape, stacked in a new dimension 0 that numbers samples; `name` is the caller's.

    A record without an extent is there everywhere. Raises MaskedSemanticsError if records know which positions are
    there by different dimensions.
    """
    given = [factors_of(record) for record in records]
    kinds = {tuple(factor.depends for factor in factors) for factors in given if factors}
    if not kinds:
        # (what was reduced from samples of length 0 is invalid in each, or in none)
        padded = all(r.extent is not None or r.validity is None for r in records)
        return extent_of((), padded and any(r.extent is not None for r in records))
    if len(kinds) > 1:
        raise MaskedSemanticsError(
            f"{name}: tensors of shape {tuple(records[0].shape)} know by different dimensions which of their positions "
            f"are there, {' and '.join(map(str, sorted(kinds)))}. Pass x.without_extent(), in which padding counts as "
            "missing."
        )
    first = next(factors for factors in given if factors)
    factors = [_stacked(factor, [f[n] if f else None for f in given]) for n, factor in enumerate(first)]
    return extent_of(factors, all(r.validity is None if r.extent is None else r.extent.is_mask for r in records))


def _stacked(like: Factor, factors: Sequence[Factor | None]) -> Factor:
    along = like.along
    theres: list[Tensor] = []
    assert like.there is not None
    shape = torch.broadcast_shapes(*[f.there.shape for f in factors if f is not None and f.there is not None])
    for factor in factors:
        there = like.there.new_ones(shape) if factor is None or factor.there is None else factor.there.expand(shape)
        theres.append(there)
        along = along if factor is None else tuple(map(met, along, factor.along))
    return Factor((SAMPLES, *along), torch.stack(theres))


def merged_with_rows(factor: Factor, shape: Sequence[int]) -> Factor | None:
    """A factor of stacked samples whose first two dimensions become one, of rows; `shape` is the result's.

    None where the second of them numbers positions.
    """
    rows, there = factor.along[1], factor.there
    if numbers_positions(rows):
        return None
    if there is not None:
        there = there.expand(-1, shape[0] // there.shape[0], *[-1] * (there.ndim - 2)).flatten(0, 1)
    return Factor((SAMPLES, *factor.along[2:]), there)
