"""Reading by index.

Law: an element moves with its validity. An invalid integer index gives an invalid element; an invalid entry of a
boolean index selects nothing. The value of an invalid index is never used: it is read as 0 (or False), so that it can
neither raise nor crash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    INDEXING,
    Dense,
    Equation,
    Number,
    Sparse,
    Unknown,
    aligned_validity,
    as_int8,
    broadcast_along,
    intersect,
    masked_rule,
)
from op_registry.dimensions.movements import AtIndices, Indexed
from op_registry.records.layout import expand_validity

aten = torch.ops.aten

Indices = Sequence[Dense | None]


def safe_indices(indices: Indices) -> list[Tensor | None]:
    """The indices with 0, or False, wherever they are invalid, so that torch can read them."""
    return [None if index is None else index.filled(0) for index in indices]


def is_boolean(index: Dense | Sparse) -> bool:
    """Whether an index is a mask (uint8 is torch's deprecated form of one)."""
    return index.dtype in (torch.bool, torch.uint8)


def dims_of_each(indices: Indices) -> list[range]:
    """The dimensions that each index consumes: one, or as many as a boolean index has."""
    dims, first = [], 0
    for index in indices:
        width = index.ndim if index is not None and is_boolean(index) else 1
        dims.append(range(first, first + width))
        first += width
    return dims


def with_masks_as_positions(x: Dense, indices: Indices) -> list[Tensor | None]:
    """The safe indices, each mask replaced by the positions where it is True.

    Data and validity are read at the same positions: while tracing, two nonzeros of a mask would give two unrelated
    symbolic sizes.
    """
    result: list[Tensor | None] = []
    for index, dims in zip(indices, dims_of_each(indices), strict=True):
        safe = None if index is None else index.filled(0)
        # A mask of the wrong shape is left for torch to refuse.
        if index is None or safe is None or not is_boolean(index) or safe.shape != x.shape[dims.start : dims.stop]:
            result.append(safe)
        else:
            result += safe.nonzero().unbind(1)
    return result


def validity_of_indices(indices: Indices, ndim: int) -> Tensor | None:
    """Where every integer index is valid, broadcastable to a result of `ndim` dimensions; None: everywhere."""
    positions = [i for i, index in enumerate(indices) if index is not None]
    used_indices = [index for index in indices if index is not None]
    validity = None
    for index in used_indices:
        if not is_boolean(index):
            validity = intersect(validity, index.full_validity)
    if validity is None:
        return None
    # The indexed dimensions come where the first index is, or in front when the indices are not adjacent.
    width = max(1 if is_boolean(index) else index.ndim for index in used_indices)
    adjacent = positions[-1] - positions[0] + 1 == len(positions)
    first = positions[0] if adjacent else 0
    return validity[(...,) + (None,) * (ndim - first - width)]


@masked_rule(
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    category=INDEXING,
    takes_op=True,
    dims=AtIndices(),
)
def index(op: OpOverload, x: Dense, indices: Indices) -> Dense:
    v = aligned_validity(x)
    safe = safe_indices(indices) if v is None else with_masks_as_positions(x, indices)
    data = op(x.data, safe)
    if v is not None:
        indexed = [d for i, dims in zip(indices, dims_of_each(indices), strict=True) if i is not None for d in dims]
        v = op(expand_validity(v, x.shape, indexed), safe)
    return Dense(data, intersect(v, validity_of_indices(indices, data.ndim)))


@masked_rule(
    aten._unsafe_masked_index.default,
    category=INDEXING,
    dims=Unknown("positions come in lists or as masks, in as many dimensions"),
)
def _unsafe_masked_index(x: Dense, mask: Dense, indices: Indices, fill: Number) -> Dense:
    """``x[indices]`` where `mask` is True, the (valid) `fill` elsewhere."""
    safe = safe_indices(indices)
    data = aten._unsafe_masked_index(x.data, mask.data, safe, fill)
    v = x.full_validity
    if v is not None:
        v = aten._unsafe_masked_index(v, mask.data, safe, 1)
    index_validity = validity_of_indices(indices, data.ndim)
    if index_validity is not None:
        index_validity = as_int8(index_validity) | ~mask.data
    return Dense(data, intersect(mask.validity, intersect(v, index_validity)))


@masked_rule(aten.index_select.default, category=INDEXING, dims=Indexed())
def index_select(x: Dense, dim: int, index: Dense) -> Dense:
    safe = index.filled(0)
    data, v = aten.index_select(x.data, dim, safe), aligned_validity(x)
    if v is not None and v.ndim and not broadcast_along(v, dim):
        v = aten.index_select(v, dim, safe)
    return Dense(data, intersect(v, reshape_along(index.full_validity, dim, data.ndim)))


def reshape_along(validity: Tensor | None, dim: int, ndim: int) -> Tensor | None:
    """The validity of a 1-d index, reshaped to broadcast along `dim` of `ndim` dimensions."""
    if validity is None or ndim == 0:
        return validity if validity is None else validity.reshape(())
    return validity.reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])


@masked_rule(aten.gather.default, category=INDEXING, dims=Indexed(aligned=True))
def gather(x: Dense, dim: int, index: Dense, *, sparse_grad: bool = False) -> Dense:
    safe = index.filled(0)
    data, v = aten.gather(x.data, dim, safe, sparse_grad=sparse_grad), aligned_validity(x)
    if v is None:
        return Dense(data, index.validity)
    if data.ndim == x.ndim and x.ndim and broadcast_along(v, dim):
        # The validity is the same for every index along `dim`; in other dimensions the index may be smaller.
        for d in range(v.ndim):
            v = v if broadcast_along(v, d) else v.narrow(d, 0, data.shape[d])
    else:
        v = aten.gather(expand_validity(v, x.shape, range(x.ndim)), dim, safe)
    return Dense(data, intersect(v, index.validity))


@masked_rule(
    aten.take.default, category=INDEXING, dims=Equation("A,*->*", "AB,*->*", "ABC,*->*", ",*->*", indexed="ABC")
)
def take(x: Dense, index: Dense) -> Dense:
    safe = index.filled(0)
    data, v = aten.take(x.data, safe), x.full_validity
    return Dense(data, intersect(None if v is None else aten.take(v, safe), index.validity))


@masked_rule(aten.masked_select.default, category=INDEXING, dims=Equation("*,*->N", indexed="*"))
def masked_select(x: Dense, mask: Dense) -> Dense:
    selected = mask.filled(False)
    if x.validity is None or selected.dtype is not torch.bool:
        return Dense(aten.masked_select(x.data, selected))  # (torch refuses masks that are not bool)
    shape = torch.broadcast_shapes(x.shape, selected.shape)
    # One nonzero for data and validity: while tracing, two would give two unrelated symbolic sizes.
    positions = selected.expand(shape).reshape(-1).nonzero().squeeze(1)
    return x.map(lambda t: t.expand(shape).reshape(-1).index_select(0, positions))
