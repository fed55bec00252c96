"""Reading by index.

Law: an element moves with its validity. An invalid integer index gives an invalid element, an invalid entry of a
boolean index selects nothing. What an invalid index holds is never looked at: it is read as 0 (or False), so that it
can neither raise nor crash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    INDEXING,
    Dense,
    Number,
    aligned_validity,
    as_int8,
    expand_validity,
    intersect,
    masked_rule,
)

aten = torch.ops.aten

Indices = Sequence[Dense | None]


def safe_indices(indices: Indices) -> list[Tensor | None]:
    """The indices as torch may read them: 0, or False, wherever they are invalid."""
    return [None if index is None else index.filled(0) for index in indices]


def is_boolean(index: Dense) -> bool:
    """Whether an index is a mask (uint8 is torch's old spelling of one)."""
    return index.dtype in (torch.bool, torch.uint8)


def dims_of_each(indices: Indices) -> list[range]:
    """The dimensions that each index takes the place of: one, or as many as a boolean index has."""
    dims, at = [], 0
    for index in indices:
        width = index.ndim if index is not None and is_boolean(index) else 1
        dims.append(range(at, at + width))
        at += width
    return dims


def counted_once(x: Dense, indices: Indices) -> list[Tensor | None]:
    """The safe indices, each mask turned into the positions where it is True.

    Data and validity are read with the same positions: while tracing, two counts of a mask would be two unknown sizes.
    """
    where: list[Tensor | None] = []
    for index, dims in zip(indices, dims_of_each(indices), strict=True):
        safe = None if index is None else index.filled(0)
        # A mask of the wrong shape is left for torch to refuse.
        if index is None or safe is None or not is_boolean(index) or safe.shape != x.shape[dims.start : dims.stop]:
            where.append(safe)
        else:
            where += safe.nonzero().unbind(1)
    return where


def validity_of_indices(indices: Indices, ndim: int) -> Tensor | None:
    """Where every integer index is valid, broadcastable to a result of `ndim` dimensions; None: everywhere."""
    used = [i for i, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    validity = None
    for index in given:
        if not is_boolean(index):
            validity = intersect(validity, index.full_validity)
    if validity is None:
        return None
    # What the indices select stands where the first of them is, or in front when they are not next to each other.
    width = max(1 if is_boolean(index) else index.ndim for index in given)
    first = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    return validity[(...,) + (None,) * (ndim - first - width)]


@masked_rule(aten.index.Tensor, aten._unsafe_index.Tensor, category=INDEXING, takes_op=True)
def index(op: OpOverload, x: Dense, indices: Indices) -> Dense:
    v = aligned_validity(x)
    where = safe_indices(indices) if v is None else counted_once(x, indices)
    data = op(x.data, where)
    if v is not None:
        indexed = [d for i, dims in zip(indices, dims_of_each(indices), strict=True) if i is not None for d in dims]
        v = op(expand_validity(v, x.shape, indexed), where)
    return Dense(data, intersect(v, validity_of_indices(indices, data.ndim)))


@masked_rule(aten._unsafe_masked_index.default, category=INDEXING)
def _unsafe_masked_index(x: Dense, mask: Dense, indices: Indices, fill: Number) -> Dense:
    """x[indices] where `mask`, the (valid) `fill` elsewhere."""
    where = safe_indices(indices)
    data = aten._unsafe_masked_index(x.data, mask.data, where, fill)
    v = x.full_validity
    if v is not None:
        v = aten._unsafe_masked_index(v, mask.data, where, 1)
    read = validity_of_indices(indices, data.ndim)
    if read is not None:
        read = as_int8(read) | ~mask.data
    return Dense(data, intersect(mask.validity, intersect(v, read)))


@masked_rule(aten.index_select.default, category=INDEXING)
def index_select(x: Dense, dim: int, index: Dense) -> Dense:
    where = index.filled(0)
    data, v = aten.index_select(x.data, dim, where), aligned_validity(x)
    if v is not None and v.ndim and v.shape[dim] != 1:
        v = aten.index_select(v, dim, where)
    return Dense(data, intersect(v, along(index.full_validity, dim, data.ndim)))


def along(validity: Tensor | None, dim: int, ndim: int) -> Tensor | None:
    """The validity of a 1-d index, laid along `dim` of `ndim` dimensions."""
    if validity is None or ndim == 0:
        return validity if validity is None else validity.reshape(())
    return validity.reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])


@masked_rule(aten.gather.default, category=INDEXING)
def gather(x: Dense, dim: int, index: Dense, *, sparse_grad: bool = False) -> Dense:
    where = index.filled(0)
    data, v = aten.gather(x.data, dim, where, sparse_grad=sparse_grad), aligned_validity(x)
    if v is None:
        return Dense(data, index.validity)
    if data.ndim == x.ndim and x.ndim and v.shape[dim] == 1:
        # The same wherever along `dim` the index points; the index may reach less far in the other dimensions.
        for d in range(v.ndim):
            v = v if v.shape[d] == 1 else v.narrow(d, 0, data.shape[d])
    else:
        v = aten.gather(expand_validity(v, x.shape, range(x.ndim)), dim, where)
    return Dense(data, intersect(v, index.validity))


@masked_rule(aten.take.default, category=INDEXING)
def take(x: Dense, index: Dense) -> Dense:
    where = index.filled(0)
    data, v = aten.take(x.data, where), x.full_validity
    return Dense(data, intersect(None if v is None else aten.take(v, where), index.validity))


@masked_rule(aten.masked_select.default, category=INDEXING)
def masked_select(x: Dense, mask: Dense) -> Dense:
    chosen = mask.filled(False)
    if x.validity is None or chosen.dtype is not torch.bool:
        return Dense(aten.masked_select(x.data, chosen))  # (torch refuses masks that are not bool)
    shape = torch.broadcast_shapes(x.shape, chosen.shape)
    # Counted once, for data and validity: while tracing, two counts of one mask would be two unknown sizes.
    where = chosen.expand(shape).reshape(-1).nonzero().squeeze(1)
    return x.map(lambda t: t.expand(shape).reshape(-1).index_select(0, where))
