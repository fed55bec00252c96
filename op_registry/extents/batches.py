"""Tensors that become rows of one: each keeps the positions that it has, where a join would intersect them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.extents.combine import laid_out, met
from op_registry.extents.factors import factors_of, index_along
from op_registry.extents.follow import is_all_valid
from op_registry.records.dense import Dense
from op_registry.records.extent import SAMPLES, Along, Extent, Factor, Positions, extent_of, numbers_positions
from op_registry.records.validity import as_int8, intersect
from op_registry.sparse.permuted import AnyRecord


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
    factors = [_end_to_end([f[n] if f else None for f in given], rows) for n in range(number)]
    return extent_of(factors, padded)


def _end_to_end(factors: Sequence[Factor | None], rows: Sequence[int]) -> Factor:
    first, *others = [factor for factor in factors if factor is not None]
    along = first.along
    for other in others:
        along = tuple(map(met, along, other.along))
    parts = [(None if factor is None else factor.there, size) for factor, size in zip(factors, rows, strict=True)]
    return Factor((SAMPLES, *along[1:]), laid_out(parts, 0, first.there))
