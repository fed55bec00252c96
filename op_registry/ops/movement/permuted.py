"""Movement of sparse records with dense dimensions in front of sparse ones (op_registry/sparse/permuted.py).

Law: as sparse.py. No element is moved: permutations are composed, and a move within one dense dimension is applied to
the base. A move within a sparse dimension has no lowering here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from op_registry.authoring import AnyRecord, NotLowered, Permuted, Rule, Sparse, to_base_order, wrap_dim
from op_registry.ops.movement import joins, views
from op_registry.ops.movement import sparse as sparse_movement
from op_registry.ops.movement.sparse import in_order_of


def lowers_permuted(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function of the operator's arguments, without the overload, as the rule's lowering."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        rule.lowering(Permuted)(lambda op, *args, **kwargs: function(*args, **kwargs))
        return function

    return register


# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers_permuted(views.permute)
def permute(x: Permuted, dims: Sequence[int]) -> Sparse | Permuted:
    order = [wrap_dim(d, x.ndim) for d in dims]
    if sorted(order) != list(range(x.ndim)):
        torch.empty(x.shape, device="meta").permute(tuple(dims))  # raises torch's error
    return in_order_of(x.base, [x.order[d] for d in order])


@lowers_permuted(views.transpose)
def transpose(x: Permuted, dim0: int, dim1: int) -> Sparse | Permuted:
    order = list(range(x.ndim))
    a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lowers_permuted(views.unsqueeze)
def unsqueeze(x: Permuted, dim: int) -> Sparse | Permuted:
    dim = wrap_dim(dim, x.ndim + 1)
    # The new dimension is the last one of the base, and is at `dim` in the order.
    return in_order_of(sparse_movement.unsqueeze(x.base, x.base.ndim), [*x.order[:dim], x.ndim, *x.order[dim:]])


@lowers_permuted(views.expand)
def expand(x: Permuted, size: Sequence[int], *, implicit: bool = False) -> Permuted:
    shape = tuple(torch.empty(x.shape, device="meta").expand(list(size)).shape)
    if len(shape) != x.ndim:
        raise NotLowered("it adds dimensions in front")
    base_shape = [shape[x.inverse[d]] for d in range(x.ndim)]
    return x.like(sparse_movement.expand(x.base, base_shape))


@lowers_permuted(views.view)
def view(x: Permuted, size: Sequence[int]) -> Sparse | Permuted:
    """Adjacent dense dimensions are merged and split; sparse ones stay as they are."""
    shape = tuple(torch.empty(x.shape, device="meta").reshape(tuple(size)).shape)
    sparse = x.base.pattern.ndim
    # First permute the dense dimensions of the base into the order in which `x` has them.
    dense = [d for d in x.order if d >= sparse]
    base = sparse_movement.permute(x.base, [*range(sparse), *dense])
    order: list[int] = []
    sizes: list[int] = []
    end = 0  # how many dimensions of the new shape are matched
    for run in _runs(x.order, sparse):
        if run[0] < sparse:
            if shape[end : end + 1] != (x.base.shape[run[0]],):
                raise NotLowered("it would mix sparse with dense dimensions")
            order.append(run[0])
            end += 1
            continue
        number, start = math.prod(x.base.shape[d] for d in run), end
        while end < len(shape) and (math.prod(shape[start:end]) != number or end == start):
            end += 1
        if math.prod(shape[start:end]) != number:
            raise NotLowered("it would mix sparse with dense dimensions")
        order += range(sparse + len(sizes), sparse + len(sizes) + end - start)
        sizes += shape[start:end]
    if end != len(shape):
        raise NotLowered("it would mix sparse with dense dimensions")
    return in_order_of(sparse_movement.view(base, [*base.pattern.sizes, *sizes]), order)


def _runs(order: Sequence[int], sparse: int) -> list[list[int]]:
    """`order` split into single sparse dimensions and runs of adjacent dense ones."""
    runs: list[list[int]] = []
    for d in order:
        if runs and d >= sparse and runs[-1][0] >= sparse:
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


# ------------------------------------------------------------------------------------------------ one dense dimension


def dense_dim(x: Permuted, dim: int) -> tuple[int, int]:
    """A dense dimension of `x`, and which dimension of the base it is; NotLowered where it is sparse."""
    dim = wrap_dim(dim, x.ndim)
    if x.order[dim] < x.base.pattern.ndim:
        raise NotLowered("it moves elements within a sparse dimension, and there are dense ones before it")
    return dim, x.order[dim]


def without_dim(x: Permuted, dim: int, base: Sparse) -> Sparse | Permuted:
    """`base`, from which the dimension that `x` has at `dim` was removed, in the order of the other dimensions."""
    removed = x.order[dim]
    return in_order_of(base, [d - (d > removed) for n, d in enumerate(x.order) if n != dim])


@lowers_permuted(views.select)
def select(x: Permuted, dim: int, index: int) -> Sparse | Permuted:
    dim, base_dim = dense_dim(x, dim)
    return without_dim(x, dim, sparse_movement.select(x.base, base_dim, index))


@lowers_permuted(views.unbind)
def unbind(x: Permuted, dim: int = 0) -> list[Sparse | Permuted]:
    dim, base_dim = dense_dim(x, dim)
    return [without_dim(x, dim, part) for part in sparse_movement.unbind(x.base, base_dim)]


@lowers_permuted(views.slice)
def slice(x: Permuted, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Permuted:
    _, base_dim = dense_dim(x, dim)
    return x.like(sparse_movement.slice(x.base, base_dim, start, end, step))


@lowers_permuted(views.split_with_sizes)
def split_with_sizes(x: Permuted, split_sizes: Sequence[int], dim: int = 0) -> list[Permuted]:
    _, base_dim = dense_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split_with_sizes(x.base, split_sizes, base_dim)]


@lowers_permuted(views.split)
def split(x: Permuted, split_size: int, dim: int = 0) -> list[Permuted]:
    _, base_dim = dense_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split(x.base, split_size, base_dim)]


@lowers_permuted(joins.cat)
def cat(tensors: Sequence[AnyRecord], dim: int = 0) -> Permuted:
    permuted = [x for x in tensors if isinstance(x, Permuted)]
    first = permuted[0]
    _, base_dim = dense_dim(first, dim)
    if len(permuted) != len(tensors):
        raise NotLowered("only some of its operands have dense dimensions before sparse ones")
    return first.like(sparse_movement.cat([to_base_order(x, first) for x in permuted], base_dim))
