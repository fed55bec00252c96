"""Movement of sparse records that show their base's dimensions in another order (op_registry/sparse/permuted.py).

Law: as sparse.py. Composing orders, and merging and splitting dimensions, move no element. A move along one dimension
is the same move along that dimension of the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.authoring import (
    ON_STORED_ROWS,
    Dense,
    Permuted,
    Sparse,
    lowers,
    shape_alone,
    wrap_dim,
)
from op_registry.ops.movement import rules as movement
from op_registry.ops.movement import sparse as sparse_movement
from op_registry.ops.movement import views
from op_registry.ops.movement.sparse import shown_as

# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers(views.squeeze, Permuted)
def squeeze(x: Permuted, dim: int | Sequence[int] | None = None) -> Sparse | Permuted:
    result: Any = x
    for d in sparse_movement.squeezed_dims(x, dim):
        if isinstance(result, Permuted):
            result = without_dim(result, d, sparse_movement.squeeze(result.base, result.base_dim(d)))
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


def base_dim(x: Permuted, dim: int) -> tuple[int, int]:
    """A dimension of `x`, non-negative, and which dimension of the base it is."""
    dim = wrap_dim(dim, x.ndim)
    return dim, x.base_dim(dim)


def without_dim(x: Permuted, dim: int, base: Dense | Sparse) -> Dense | Sparse | Permuted:
    """`base`, which lacks the dimension that `x` shows at `dim`, with the other dimensions shown as in `x`."""
    removed = x.base_dim(dim)
    groups = [tuple(d - (d > removed) for d in group) for n, group in enumerate(x.groups) if n != dim]
    if isinstance(base, Dense):
        return base.map(lambda t: t.permute([d for group in groups for d in group]))
    return shown_as(base, groups)


@lowers(views.select, Permuted)
def select(x: Permuted, dim: int, index: int) -> Dense | Sparse | Permuted:
    dim, of_base = base_dim(x, dim)
    return without_dim(x, dim, sparse_movement.select(x.base, of_base, index))


@lowers(views.unbind, Permuted)
def unbind(x: Permuted, dim: int = 0) -> list[Dense | Sparse | Permuted]:
    dim, of_base = base_dim(x, dim)
    return [without_dim(x, dim, part) for part in sparse_movement.unbind(x.base, of_base)]


@lowers(views.slice, Permuted)
def slice(x: Permuted, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Permuted:
    _, of_base = base_dim(x, dim)
    return x.like(sparse_movement.slice(x.base, of_base, start, end, step))


@lowers(views.narrow_copy, Permuted)
def narrow_copy(x: Permuted, dim: int, start: int, length: int) -> Permuted:
    return slice(x, dim, start, start + length)


@lowers(views.unsafe_split_with_sizes, Permuted)
@lowers(views.split_with_sizes, Permuted)
def split_with_sizes(x: Permuted, split_sizes: Sequence[int], dim: int = 0) -> list[Permuted]:
    _, of_base = base_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split_with_sizes(x.base, split_sizes, of_base)]


@lowers(views.unsafe_split, Permuted)
@lowers(views.split, Permuted)
def split(x: Permuted, split_size: int, dim: int = 0) -> list[Permuted]:
    _, of_base = base_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split(x.base, split_size, of_base)]
