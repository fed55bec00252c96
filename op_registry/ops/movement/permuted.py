"""Movement of sparse records that show their base's dimensions in another order (op_registry/sparse/permuted.py).

Law: as sparse.py. Composing orders, and merging and splitting dimensions, move no element. A move along one dimension
is the same move along that dimension of the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.authoring import (
    ALONG_BASE_DIM,
    ON_STORED_ROWS,
    Permuted,
    Sparse,
    lowers,
    shape_alone,
    shown_without,
)
from op_registry.ops.movement import rules as movement
from op_registry.ops.movement import sparse as sparse_movement
from op_registry.ops.movement import views

# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers(views.squeeze, Permuted)
def squeeze(x: Permuted, dim: int | Sequence[int] | None = None) -> Sparse | Permuted:
    result: Any = x
    for d in sparse_movement.squeezed_dims(x, dim):
        if isinstance(result, Permuted):
            squeezed = sparse_movement.squeeze(result.base, result.base_dim(d))
            result = shown_without(squeezed, result, [d], keepdim=False)
        else:
            result = sparse_movement.squeeze(result, d)
    return result


@lowers(views.expand, Permuted)
def expand(x: Any, size: Sequence[int], *, implicit: bool = False) -> Permuted:
    shape = tuple(shape_alone(x.shape).expand(list(size)).shape)
    for _ in range(len(shape) - x.ndim):
        x = sparse_movement.unsqueeze(x, 0)
    base_shape = list(x.base.shape)
    for dim, (new, old) in enumerate(zip(shape, x.shape, strict=True)):
        if new != old:
            base_shape[x.base_dim(dim)] = new
    return x.like(sparse_movement.expand(x.base, base_shape))


# ------------------------------------------------------------------------------------------------ along one dimension

movement.roll.lowering(Permuted)(ON_STORED_ROWS)
views.unfold.lowering(Permuted)(ON_STORED_ROWS)
for _rule in (
    views.select,
    views.unbind,
    views.slice,
    views.narrow_copy,
    views.split,
    views.split_with_sizes,
    views.unsafe_split,
    views.unsafe_split_with_sizes,
):
    _rule.lowering(Permuted)(ALONG_BASE_DIM)
