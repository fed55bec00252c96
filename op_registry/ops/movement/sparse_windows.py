"""Padding and windows on sparse storage: an index_select along each dimension, with repeated indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import NotLowered, Number, Permuted, Sparse, shape_alone, wrap_dim
from op_registry.ops.movement import rules as movement
from op_registry.ops.movement import views
from op_registry.ops.movement.sparse import last_sparse_dim_last
from op_registry.sparse.convert import unpadded_elements, with_coordinates
from op_registry.sparse.on_values import lowers, map_dense_dim, select_along, slice_of

aten = torch.ops.aten


def _pad_by_index(op: OpOverload, x: Sparse, pad: Sequence[int]) -> Sparse:
    """Padding that repeats elements selects them along each dimension by the indices that torch's kernel reads."""
    op(shape_alone(x.shape), pad)  # raises torch's errors
    if op is aten._pad_circular.default and any(width < 0 for width in pad):
        raise NotLowered("with negative padding it wraps around within the remaining elements")
    dims = [x.ndim - 1 - n for n in range(len(pad) // 2)]
    return select_along(x, {d: _padded_indices(op, x, d, pad[2 * n : 2 * n + 2]) for n, d in enumerate(dims)})


def _padded_indices(op: OpOverload, x: Sparse, dim: int, pad: Sequence[int]) -> Tensor:
    """For each index of the padded dimension, the index of `dim` that it repeats."""
    size = x.shape[dim]
    before, after = pad
    index = torch.arange(-before, size + after, device=x.device)
    name = op._schema.name
    if "replication" in name:
        return index.clamp(0, size - 1)
    if "circular" in name:
        return index % size
    reflected = index.abs()
    return torch.where(reflected >= size, 2 * (size - 1) - reflected, reflected)


for rule in (movement.reflection_pad, movement.replication_pad, movement._pad_circular):
    rule.lowering(Sparse)(_pad_by_index)


@movement.constant_pad_nd.lowering(Sparse)
def constant_pad_nd(op: OpOverload, x: Sparse, pad: Sequence[int], value: Number = 0) -> Sparse:
    if any(width > 0 for width in pad):
        raise NotLowered("padding is valid, and would have to be stored")
    aten.constant_pad_nd(shape_alone(x.shape), pad, value)  # raises torch's errors
    for n, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.ndim - 1 - n
        if before or after:
            x = slice_of(x, dim, -before, x.shape[dim] + after)
    return x


@lowers(views.unfold)
def unfold(x: Sparse, dimension: int, size: int, step: int) -> Sparse | Permuted:
    """Every window in a new last dimension; an element is repeated for each window that contains it."""
    shape = shape_alone(x.shape).unfold(dimension, size, step).shape
    dim = wrap_dim(dimension, x.ndim)
    if dim >= x.pattern.ndim:
        return map_dense_dim(x, dim, lambda t, d: t.unfold(d, size, step))
    flat, coordinates = unpadded_elements(x)
    stored = coordinates[dim].shape[0]
    most_windows = -(-size // step)  # that contain one element
    source = torch.arange(stored, device=x.device).repeat_interleave(most_windows)
    earlier = torch.arange(most_windows, device=x.device).repeat(stored)
    window = coordinates[dim][source] // step - earlier
    in_window = coordinates[dim][source] - window * step
    kept = ((window >= 0) & (window < shape[dim]) & (in_window < size)).nonzero()[:, 0]
    source = source[kept]
    moved = [window[kept] if d == dim else c[source] for d, c in enumerate(coordinates)]
    sizes = (*shape[: x.pattern.ndim], size)
    return last_sparse_dim_last(with_coordinates(x, [*moved, in_window[kept]], flat.take_rows(source), sizes))
