"""What an extent needs of sparse records: where they are valid, and their elements under another mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.validity import as_bool, as_int8, unite
from op_registry.sparse.elements import elements_at
from op_registry.sparse.elementwise import align_to
from op_registry.sparse.layout import Layout
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.permuted import Permuted, shown
from op_registry.sparse.record import Sparse, with_sparse_dims


def validity_over(record: Sparse | Permuted, gone: Sequence[int]) -> Callable[[], Tensor]:
    """What computes where a record has a valid element over the dimensions `gone`, which get size 1: int8.

    It keeps no values; where all that is stored is valid, its result is remembered with the pattern.
    """
    base, groups = shown(record)
    pattern, values = base.pattern, base.values
    sizes = list(values.data.shape)
    if values.validity is None:  # one element of each is enough: its others are as valid
        for d in [d for dim in gone for d in groups[dim] if d >= pattern.ndim]:
            sizes[d - pattern.ndim + pattern.lead] = 1
    shape, validity, device = record.shape, values.validity, values.device

    def over() -> Tensor:
        like = torch.ones((), dtype=torch.int8, device=device).expand(sizes)
        valid = Sparse(Dense(like, validity), pattern)
        count = valid.count_over([d for dim in gone for d in groups[dim]], keepdim=True)
        size = [1 if dim in gone else s for dim, s in enumerate(shape)]
        return as_int8(count.permute([d for group in groups for d in group]).reshape(size) > 0)

    if validity is not None:
        return over
    key = ("valid over", tuple(gone), groups, *sizes[pattern.lead :])
    return lambda: pattern.cached(key, over)


def masked(record: Sparse | Permuted, there: Tensor) -> Sparse | Permuted:
    """The same stored elements, valid where `there` (int8, broadcastable to the record) is 1, too."""
    if isinstance(record, Permuted):
        base = masked(record.base, record.to_base(there))
        assert isinstance(base, Sparse)
        return record.like(base)
    found = align_to(Dense(there), record).data
    return Sparse(record.values.masked_by(as_int8(found)), record.pattern)


def zero_where(record: Sparse | Permuted, where: Tensor) -> Sparse | Permuted:
    """The same stored elements, but for valid zeros where `where` (broadcastable to the record) is 1."""
    if isinstance(record, Permuted):
        base = zero_where(record.base, record.to_base(where))
        assert isinstance(base, Sparse)
        return record.like(base)
    at = as_int8(align_to(Dense(as_int8(where)), record).data)
    data = torch.where(as_bool(at), 0, record.values.data)
    return Sparse(Dense(data, unite(record.values.validity, at)), record.pattern)


def within_rows(
    record: Sparse | Permuted, dim: int, source: Callable[[Tensor, Tensor], Tensor]
) -> Sparse | Permuted | None:
    """Each row's stored elements in another order along `dim`: rank r reads rank ``source(r, n)`` of n.

    None if elements are not stored row by row along it, or some are invalid.
    """
    base, groups = shown(record)
    pattern = base.pattern
    ends = pattern.ends() if pattern.layout.of_sequences else None
    if ends is None or groups[dim] != (1,) or base.values.validity is not None:
        return None
    row = torch.repeat_interleave(ends.diff(), output_size=pattern.stored)
    start, count = ends[:-1].index_select(0, row), ends.diff().index_select(0, row)
    rank = torch.arange(pattern.stored, device=record.device) - start
    index = start + source(rank, count)
    values = base.values.map(lambda t: t.index_select(0, index))
    changed = Sparse(values, pattern)
    return record.like(changed) if isinstance(record, Permuted) else changed


def packed(record: Dense | Sparse, there: Tensor, layout: Layout) -> Sparse:
    """The rows of a batch that are there, valid or missing, in a layout of rows; `there` broadcasts to the record."""
    sizes = tuple(record.shape[:2])
    inner = list(range(2, there.ndim))
    rows = as_bool(there).any(inner) if inner else there.reshape(there.shape[:2])
    coordinates, pieces = layout.from_mask(as_int8(rows).expand(sizes))
    x = record if isinstance(record, Dense) else with_sparse_dims(record, 2)
    return Sparse(elements_at(x, coordinates), Pattern(layout, sizes, pieces))
