"""The factors of a record's extent, and the algebra of their booleans; of sparse records, those of what they store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense
from op_registry.records.divided import is_divided
from op_registry.records.extent import (
    Along,
    Boolean,
    Extent,
    Factor,
    is_nonempty,
    maybe_empty,
)
from op_registry.records.validity import as_bool, as_int8, intersect, unite
from op_registry.sparse.convert import elements_at, with_sparse_dims
from op_registry.sparse.layout import Layout
from op_registry.sparse.on_values import align_to
from op_registry.sparse.permuted import AnyRecord, Permuted, shown
from op_registry.sparse.record import Pattern, Sparse


def factors_of(record: AnyRecord) -> tuple[Factor, ...]:
    """The factors of a record's extent, each with its boolean; none where it has no extent."""
    extent = record.extent
    if extent is None:
        return ()
    return tuple([replace(f, said=said_of(record, f)) if f.said is None else f for f in extent.factors])


def said_of(record: AnyRecord, factor: Factor) -> Tensor | Boolean:
    """The boolean of a record's factor."""
    if factor.said is not None:
        return factor.said
    as_factor: Callable[[], Tensor]
    if isinstance(record, Dense):
        as_factor = functools.partial(_as_factor, record.validity, record.shape, record.device, factor.along)
    else:
        as_factor = validity_over(record, [d for d, known in enumerate(factor.along) if known is None])
    return Boolean(as_factor, ())


def _as_factor(validity: Tensor | None, sizes: torch.Size, device: torch.device, along: Sequence[Along]) -> Tensor:
    """A validity of data of these sizes, of size 1 where `along` does not depend on a dimension."""
    if validity is None:  # an empty tensor, or a batch without padding
        shape = [1 if a is None else s for a, s in zip(along, sizes, strict=True)]
        return torch.ones(shape, dtype=torch.int8, device=device)
    return fitted(as_int8(validity), sizes, along)


def fitted(there: Tensor, sizes: Sequence[int], along: Sequence[Along]) -> Tensor:
    """A boolean that broadcasts to these sizes as a factor has it: of full size where it depends on a dimension."""
    there = narrowed(there, along)
    broadcast = [d for d, known in enumerate(along) if known is not None and type(there.shape[d]) is int]
    if not any(there.shape[d] == 1 and not known_to_hold(sizes[d] == 1) for d in broadcast):
        return there  # the same object: masks stay shared
    # (one position that is merged with features is of size 1 until here)
    return there.expand([t if known is None else s for t, s, known in zip(there.shape, sizes, along, strict=True)])


def narrowed(there: Tensor, along: Sequence[Along]) -> Tensor:
    """A boolean of full size as a factor has it: of size 1 where it does not depend on a dimension."""
    for dim, known in enumerate(along):
        if known is None and not known_to_hold(there.shape[dim] == 1):
            # (all of its elements are equal; of none, everything can be said)
            if known_to_hold(there.shape[dim] > 0) and not is_divided(there):
                there = there.narrow(dim, 0, 1)
            else:  # (a part of each rank would be gathered from all)
                there = as_int8(as_bool(there).all(dim, keepdim=True))
    return there


def with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """A shape with this size in one of its dimensions."""
    return [size if d == dim else s for d, s in enumerate(shape)]


def conjunction(factors: Sequence[Factor]) -> Tensor | None:
    """Where every factor is; int8 that broadcasts to the tensor; None without factors."""
    return where_all(factors) if factors else None


def where_all(factors: Sequence[Factor]) -> Tensor:
    """Where every factor is, of one or more; int8 that broadcasts to the tensor."""
    there, *others = (factor.there for factor in factors)
    for other in others:
        there = intersect(there, other)
    return there


def any_along(there: Tensor, dims: Sequence[int]) -> Tensor:
    """int8, of size 1 in these dimensions: whether a boolean holds at an index of them."""
    return as_int8(as_bool(there).any(tuple(dims), keepdim=True)) if dims else there


def there(record: AnyRecord) -> Tensor:
    """bool of the record's shape: which positions are there."""
    found = conjunction(factors_of(record))
    if found is None:
        return torch.ones(record.shape, dtype=torch.bool, device=record.device)
    return as_bool(found).expand(record.shape)


def first_known(factors: Sequence[Factor]) -> tuple[Along, ...]:
    """What the first factor that depends on a dimension knows of it, dimension by dimension."""
    return tuple(map(_first_known, zip(*[f.along for f in factors], strict=True)))


def _first_known(alongs: Sequence[Along]) -> Along:
    known = [along for along in alongs if along is not None]
    if not known:
        return None
    return known[0] if all(map(is_nonempty, known)) else maybe_empty(known[0])


def index_along(dim: int, size: int, ndim: int, device: torch.device) -> Tensor:
    """0 … size - 1 along `dim` of a tensor of `ndim` dimensions, of size 1 in others."""
    return torch.arange(size, device=device).reshape([-1 if d == dim else 1 for d in range(ndim)])


def in_front(there: Tensor, dim: int) -> Tensor:
    """The indices along `dim` that put those at which a boolean holds in front, in their order."""
    return as_bool(there).logical_not().to(torch.uint8).argsort(dim=dim, stable=True)


def along_dim(record: AnyRecord, dim: int) -> Tensor | None:
    """int8: which indices of `dim` are positions that are there, by those factors that depend on it; None: all are."""
    return conjunction([f for f in factors_of(record) if f.along[dim] is not None])


def with_extent(record: AnyRecord, extent: Extent | None) -> Any:
    """The same record with this extent."""
    if isinstance(record, Dense):
        return Dense(record.data, record.validity, extent)
    if isinstance(record, Sparse):
        return Sparse(record.values, record.pattern, extent)
    return Permuted(record.base, record.order, extent)


def confined(record: AnyRecord, there: Tensor | None) -> Any:
    """The record without its extent, valid where it is there, too."""
    if there is None:
        return with_extent(record, None)
    if isinstance(record, Dense):
        return Dense(record.data, intersect(record.validity, there))
    return masked(record, there)


# ------------------------------------------------------------------------------------------------------- sparse records


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
    base, at = _at_elements(record, there)
    return _of_values(record, base, base.values.masked_by(at))


def zero_where(record: Sparse | Permuted, where: Tensor) -> Sparse | Permuted:
    """The same stored elements, but for valid zeros where `where` (broadcastable to the record) is 1."""
    base, at = _at_elements(record, as_int8(where))
    data = torch.where(as_bool(at), 0, base.values.data)
    return _of_values(record, base, Dense(data, unite(base.values.validity, at)))


def _at_elements(record: Sparse | Permuted, boolean: Tensor) -> tuple[Sparse, Tensor]:
    """What a record stores, and a boolean that broadcasts to the record at the stored elements."""
    if isinstance(record, Permuted):
        return _at_elements(record.base, record.to_base(boolean))
    return record, as_int8(align_to(Dense(boolean), record).data)


def _of_values(record: Sparse | Permuted, base: Sparse, values: Dense) -> Sparse | Permuted:
    changed = Sparse(values, base.pattern)
    return record.like(changed) if isinstance(record, Permuted) else changed


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
    return _of_values(record, base, base.values.map(lambda t: t.index_select(0, index)))


def packed(record: Dense | Sparse, there: Tensor, layout: Layout) -> Sparse:
    """The rows of a batch that are there, valid or missing, in a layout of rows; `there` broadcasts to the record."""
    sizes = tuple(record.shape[:2])
    inner = list(range(2, there.ndim))
    rows = as_bool(there).any(inner) if inner else there.reshape(there.shape[:2])
    coordinates, pieces = layout.from_mask(as_int8(rows).expand(sizes))
    x = record if isinstance(record, Dense) else with_sparse_dims(record, 2)
    return Sparse(elements_at(x, coordinates), Pattern(layout, sizes, pieces))
