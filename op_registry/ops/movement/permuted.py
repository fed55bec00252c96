"""Movement of sparse records whose dense dimensions stand before sparse ones (turned.py): nothing is moved.

Law: as sparse_movement.py. An order is composed with another; a move within one dense dimension is that move of the
base. A move within a sparse dimension has no form here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from op_registry.authoring import NotLowered, Permuted, Rule, Sparse, to_base_order, wrap_dim
from op_registry.ops.movement import joins, views
from op_registry.ops.movement import sparse as sparse_movement
from op_registry.ops.movement.sparse import in_order_of


def lowers_permuted(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function of the operator's arguments, without the overload, as the rule's lowering."""

    def hang(function: Callable[..., Any]) -> Callable[..., Any]:
        rule.lowering(Permuted)(lambda op, *args, **kwargs: function(*args, **kwargs))
        return function

    return hang


# ---------------------------------------------------------------------------------------------- order of dimensions


@lowers_permuted(views.permute)
def permute(x: Permuted, dims: Sequence[int]) -> Any:
    order = [wrap_dim(d, x.ndim) for d in dims]
    if sorted(order) != list(range(x.ndim)):
        torch.empty(x.shape, device="meta").permute(tuple(dims))  # raises torch's error
    return in_order_of(x.base, [x.order[d] for d in order])


@lowers_permuted(views.transpose)
def transpose(x: Permuted, dim0: int, dim1: int) -> Any:
    order = list(range(x.ndim))
    a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lowers_permuted(views.unsqueeze)
def unsqueeze(x: Permuted, dim: int) -> Any:
    at = wrap_dim(dim, x.ndim + 1)
    # Behind everything in the base, and where it is asked for in the order.
    return in_order_of(sparse_movement.unsqueeze(x.base, x.base.ndim), [*x.order[:at], x.ndim, *x.order[at:]])


@lowers_permuted(views.expand)
def expand(x: Permuted, size: Sequence[int], *, implicit: bool = False) -> Any:
    shape = tuple(torch.empty(x.shape, device="meta").expand(list(size)).shape)
    if len(shape) != x.ndim:
        raise NotLowered("it repeats the whole")
    inner = [shape[x.back[d]] for d in range(x.ndim)]
    return x.like(sparse_movement.expand(x.base, inner))


@lowers_permuted(views.view)
def view(x: Permuted, size: Sequence[int]) -> Any:
    """Dense dimensions that are seen side by side become others; sparse ones stay what they are."""
    shape = tuple(torch.empty(x.shape, device="meta").reshape(tuple(size)).shape)
    sparse = x.base.pattern.ndim
    # The base with its dense dimensions in the order in which they are seen.
    dense = [d for d in x.order if d >= sparse]
    base = sparse_movement.permute(x.base, [*range(sparse), *dense])
    order: list[int] = []
    sizes: list[int] = []
    at = 0
    for run in _runs(x.order, sparse):
        if run[0] < sparse:
            if shape[at : at + 1] != (x.base.shape[run[0]],):
                raise NotLowered("it would mix sparse with dense dimensions")
            order.append(run[0])
            at += 1
            continue
        number, start = math.prod(x.base.shape[d] for d in run), at
        while at < len(shape) and (math.prod(shape[start:at]) != number or at == start):
            at += 1
        if math.prod(shape[start:at]) != number:
            raise NotLowered("it would mix sparse with dense dimensions")
        order += range(sparse + len(sizes), sparse + len(sizes) + at - start)
        sizes += shape[start:at]
    if at != len(shape):
        raise NotLowered("it would mix sparse with dense dimensions")
    return in_order_of(sparse_movement.view(base, [*base.pattern.sizes, *sizes]), order)


def _runs(order: Sequence[int], sparse: int) -> list[list[int]]:
    """The order cut into sparse dimensions, one by one, and the runs of dense ones between them."""
    runs: list[list[int]] = []
    for d in order:
        if runs and d >= sparse and runs[-1][0] >= sparse:
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


# --------------------------------------------------------------------------------------------- one dense dimension


def dense_dim(x: Permuted, dim: int) -> tuple[int, int]:
    """A dimension as it is seen and in the base; NotLowered where it is a sparse one."""
    at = wrap_dim(dim, x.ndim)
    if x.order[at] < x.base.pattern.ndim:
        raise NotLowered("it moves elements within a sparse dimension that stands behind a dense one")
    return at, x.order[at]


def without(x: Permuted, at: int, base: Sparse) -> Any:
    """`base`, which has lost the dimension that is seen at `at`, in the order of the others."""
    gone = x.order[at]
    return in_order_of(base, [d - (d > gone) for n, d in enumerate(x.order) if n != at])


@lowers_permuted(views.select)
def select(x: Permuted, dim: int, index: int) -> Any:
    at, own = dense_dim(x, dim)
    return without(x, at, sparse_movement.select(x.base, own, index))


@lowers_permuted(views.unbind)
def unbind(x: Permuted, dim: int = 0) -> list[Any]:
    at, own = dense_dim(x, dim)
    return [without(x, at, part) for part in sparse_movement.unbind(x.base, own)]


@lowers_permuted(views.slice)
def slice(x: Permuted, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    _, own = dense_dim(x, dim)
    return x.like(sparse_movement.slice(x.base, own, start, end, step))


@lowers_permuted(views.split_with_sizes)
def split_with_sizes(x: Permuted, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    _, own = dense_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split_with_sizes(x.base, split_sizes, own)]


@lowers_permuted(views.split)
def split(x: Permuted, split_size: int, dim: int = 0) -> list[Any]:
    _, own = dense_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split(x.base, split_size, own)]


@lowers_permuted(joins.cat)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    by = next(x for x in tensors if isinstance(x, Permuted))
    _, own = dense_dim(by, dim)
    if not all(isinstance(x, Permuted) for x in tensors):
        raise NotLowered("they are not all stored alike")
    return by.like(sparse_movement.cat([to_base_order(x, by) for x in tensors], own))
