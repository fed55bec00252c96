"""What an extent needs of sparse records: where they are valid, and their elements under another mask."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8
from op_registry.sparse.elementwise import align_to, elements_at
from op_registry.sparse.layout import Layout
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.permuted import Permuted, shown
from op_registry.sparse.record import Sparse, with_sparse_dims


def validity_over(record: Sparse | Permuted, gone: Sequence[int]) -> Tensor:
    """Where a record has a valid element over the dimensions `gone`, which get size 1: int8.

    Remembered with the pattern where all that is stored is valid.
    """
    base, groups = shown(record)
    if base.values.validity is not None:
        return as_int8(record.count(gone, keepdim=True) > 0)

    def counted() -> Tensor:
        values = base.values.data  # one element of each is enough: its others are as valid
        for dim in gone:
            for d in groups[dim]:
                if d >= base.pattern.ndim:
                    values = values[(slice(None),) * (d - base.pattern.ndim + base.pattern.lead) + (slice(1),)]
        one = Sparse(Dense(values.detach()), base.pattern)
        return as_int8((record.like(one) if isinstance(record, Permuted) else one).count(gone, keepdim=True) > 0)

    kept = [d for dim, group in enumerate(groups) if dim not in gone for d in group if d >= base.pattern.ndim]
    sizes = (base.shape[d] for d in kept)
    found: Tensor = base.pattern.cached(("valid over", tuple(gone), groups, *sizes), counted)
    return found


def masked(record: Sparse | Permuted, there: Tensor) -> Sparse | Permuted:
    """The same stored elements, valid where `there` (int8, broadcastable to the record) is 1, too."""
    if isinstance(record, Permuted):
        base = masked(record.base, record.to_base(there))
        assert isinstance(base, Sparse)
        return record.like(base)
    found = align_to(Dense(there), record).data
    return Sparse(record.values.masked_by(as_int8(found)), record.pattern)


def packed(record: Dense | Sparse, there: Tensor, layout: Layout) -> Sparse:
    """The rows of a batch that are there, valid or missing, in a layout of rows; `there` broadcasts to the record."""
    sizes = tuple(record.shape[:2])
    inner = list(range(2, there.ndim))
    rows = as_int8(there.amax(inner)) if inner and there.numel() else there.reshape(there.shape[:2])
    coordinates, pieces = layout.from_mask(rows.expand(sizes))
    x = record if isinstance(record, Dense) else with_sparse_dims(record, 2)
    return Sparse(elements_at(x, coordinates), Pattern(layout, sizes, pieces))
