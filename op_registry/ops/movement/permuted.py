"""Movement of sparse records that show their base's dimensions in another order (op_registry/sparse/permuted.py).

Law: as sparse.py. Composing orders, and merging and splitting dimensions, move no element. A move along one dimension
is the same move along that dimension of the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from op_registry.authoring import (
    AnyRecord,
    Dense,
    NotLowered,
    Permuted,
    Rule,
    Sparse,
    shape_alone,
    to_base_order,
    wrap_dim,
)
from op_registry.ops.movement import joins, views
from op_registry.ops.movement import sparse as sparse_movement
from op_registry.ops.movement.sparse import shown_as, viewed


def lowers_permuted(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a function of the operator's arguments (without the overload) the rule's lowering."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        rule.lowering(Permuted)(lambda op, *args, **kwargs: function(*args, **kwargs))
        return function

    return register


# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers_permuted(views.permute)
def permute(x: Permuted, dims: Sequence[int]) -> Sparse | Permuted:
    order = [wrap_dim(d, x.ndim) for d in dims]
    if sorted(order) != list(range(x.ndim)):
        shape_alone(x.shape).permute(tuple(dims))  # raises torch's error
    return shown_as(x.base, [x.groups[d] for d in order])


@lowers_permuted(views.transpose)
def transpose(x: Permuted, dim0: int, dim1: int) -> Sparse | Permuted:
    order = list(range(x.ndim))
    a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lowers_permuted(views.t)
def t(x: Permuted) -> Sparse | Permuted:
    if x.ndim > 2:
        shape_alone(x.shape).t()  # raises torch's error
    return permute(x, list(range(x.ndim))[::-1])


@lowers_permuted(views.unsqueeze)
def unsqueeze(x: Permuted, dim: int) -> Sparse | Permuted:
    dim = wrap_dim(dim, x.ndim + 1)
    # The new dimension is the last one of the base.
    base = x.base.like(x.base.values.map(lambda t: t.unsqueeze(-1)))
    return shown_as(base, [*x.groups[:dim], (x.base.ndim,), *x.groups[dim:]])


@lowers_permuted(views.squeeze)
def squeeze(x: Permuted, dim: int | Sequence[int] | None = None) -> Sparse | Permuted:
    candidates = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    removed = {d for d in (wrap_dim(d, x.ndim) for d in candidates) if x.shape[d] == 1}
    result: Any = x
    for d in sorted(removed, reverse=True):
        if not isinstance(result, Permuted):
            return sparse_movement.squeeze(result, [d for d in removed if d < result.ndim])
        if result.base_dim(d) < result.base.pattern.ndim:
            raise NotLowered("it removes a sparse dimension")
        removed.remove(d)
        result = without_dim(result, d, sparse_movement.squeeze(result.base, result.base_dim(d)))
    return result


@lowers_permuted(views.expand)
def expand(x: Permuted, size: Sequence[int], *, implicit: bool = False) -> Permuted:
    shape = tuple(shape_alone(x.shape).expand(list(size)).shape)
    if len(shape) != x.ndim:
        raise NotLowered("it adds dimensions in front")
    base_shape = list(x.base.shape)
    for dim, (new, old) in enumerate(zip(shape, x.shape, strict=True)):
        if new != old:
            base_shape[x.base_dim(dim)] = new
    return x.like(sparse_movement.expand(x.base, base_shape))


@lowers_permuted(views.view)
def view(x: Permuted, size: Sequence[int]) -> Sparse | Permuted:
    """Adjacent dimensions are merged, and merged or dense ones split; sparse ones stay whole."""
    return viewed(x.base, x.groups, sparse_movement.shape_of_view(x.shape, size))


# ------------------------------------------------------------------------------------------------ along one dimension


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


@lowers_permuted(views.select)
def select(x: Permuted, dim: int, index: int) -> Dense | Sparse | Permuted:
    dim, of_base = base_dim(x, dim)
    return without_dim(x, dim, sparse_movement.select(x.base, of_base, index))


@lowers_permuted(views.unbind)
def unbind(x: Permuted, dim: int = 0) -> list[Dense | Sparse | Permuted]:
    dim, of_base = base_dim(x, dim)
    return [without_dim(x, dim, part) for part in sparse_movement.unbind(x.base, of_base)]


@lowers_permuted(views.slice)
def slice(x: Permuted, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Permuted:
    _, of_base = base_dim(x, dim)
    return x.like(sparse_movement.slice(x.base, of_base, start, end, step))


@lowers_permuted(views.narrow_copy)
def narrow_copy(x: Permuted, dim: int, start: int, length: int) -> Permuted:
    return slice(x, dim, start, start + length)


@lowers_permuted(views.unsafe_split_with_sizes)
@lowers_permuted(views.split_with_sizes)
def split_with_sizes(x: Permuted, split_sizes: Sequence[int], dim: int = 0) -> list[Permuted]:
    _, of_base = base_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split_with_sizes(x.base, split_sizes, of_base)]


@lowers_permuted(views.unsafe_split)
@lowers_permuted(views.split)
def split(x: Permuted, split_size: int, dim: int = 0) -> list[Permuted]:
    _, of_base = base_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split(x.base, split_size, of_base)]


@lowers_permuted(joins.cat)
def cat(tensors: Sequence[AnyRecord], dim: int = 0) -> Sparse | Permuted:
    tensors = sparse_movement.without_empty(tensors)
    permuted = [x for x in tensors if isinstance(x, Permuted)]
    first = permuted[0]
    _, of_base = base_dim(first, dim)
    if len(permuted) != len(tensors):
        raise NotLowered("only some of its operands have their dimensions in another order")
    bases: list[Any] = [to_base_order(x, first) for x in permuted]
    joined = sparse_movement.cat(bases, of_base)
    if joined.pattern.ndim == first.base.pattern.ndim:
        return first.like(joined)
    if any(len(group) > 1 for group in first.groups):
        raise NotLowered("it joins along a dense dimension, and its operands do not share a sparsity pattern")
    return shown_as(joined, first.groups)


@lowers_permuted(joins.stack)
def stack(tensors: Sequence[AnyRecord], dim: int = 0) -> Any:
    if not all(isinstance(x, Permuted) for x in tensors) or len({tuple(x.shape) for x in tensors}) > 1:
        raise NotLowered("its operands differ in shape, or only some have their dimensions in another order")
    dim = wrap_dim(dim, tensors[0].ndim + 1)
    return sparse_movement.joined([unsqueeze(x, dim) for x in tensors], dim)
