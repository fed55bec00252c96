"""Movement of sparse records whose dense dimensions stand before sparse ones (turned.py): nothing is moved.

Law: as sparse_movement.py. An order is composed with another; a move within one dense dimension is that move of the
base. A move within a sparse dimension has no form here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from op_registry.ops import joins, sparse_movement, views
from op_registry.ops.sparse_movement import in_order_of, position
from op_registry.rule import Rule
from op_registry.sparse import NotLowered, Sparse
from op_registry.turned import Turned, turned_back


def moves_turned(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function of the operator's arguments, without the overload, as the rule's lowering."""

    def hang(function: Callable[..., Any]) -> Callable[..., Any]:
        rule.lowering(Turned)(lambda op, *args, **kwargs: function(*args, **kwargs))
        return function

    return hang


# ---------------------------------------------------------------------------------------------- order of dimensions


@moves_turned(views.permute)
def permute(x: Turned, dims: Sequence[int]) -> Any:
    order = [position(d, x.ndim) for d in dims]
    if sorted(order) != list(range(x.ndim)):
        torch.empty(x.shape, device="meta").permute(tuple(dims))  # raises torch's error
    return in_order_of(x.base, [x.order[d] for d in order])


@moves_turned(views.transpose)
def transpose(x: Turned, dim0: int, dim1: int) -> Any:
    order = list(range(x.ndim))
    a, b = position(dim0, x.ndim), position(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@moves_turned(views.unsqueeze)
def unsqueeze(x: Turned, dim: int) -> Any:
    at = position(dim, x.ndim + 1)
    # Behind everything in the base, and where it is asked for in the order.
    return in_order_of(sparse_movement.unsqueeze(x.base, x.base.ndim), [*x.order[:at], x.ndim, *x.order[at:]])


@moves_turned(views.expand)
def expand(x: Turned, size: Sequence[int], *, implicit: bool = False) -> Any:
    shape = tuple(torch.empty(x.shape, device="meta").expand(list(size)).shape)
    if len(shape) != x.ndim:
        raise NotLowered("it repeats the whole")
    inner = [shape[x.back[d]] for d in range(x.ndim)]
    return x.like(sparse_movement.expand(x.base, inner))


@moves_turned(views.view)
def view(x: Turned, size: Sequence[int]) -> Any:
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


def dense_dim(x: Turned, dim: int) -> tuple[int, int]:
    """A dimension as it is seen and in the base; NotLowered where it is a sparse one."""
    at = position(dim, x.ndim)
    if x.order[at] < x.base.pattern.ndim:
        raise NotLowered("it moves elements within a sparse dimension that stands behind a dense one")
    return at, x.order[at]


def without(x: Turned, at: int, base: Sparse) -> Any:
    """`base`, which has lost the dimension that is seen at `at`, in the order of the others."""
    gone = x.order[at]
    return in_order_of(base, [d - (d > gone) for n, d in enumerate(x.order) if n != at])


@moves_turned(views.select)
def select(x: Turned, dim: int, index: int) -> Any:
    at, own = dense_dim(x, dim)
    return without(x, at, sparse_movement.select(x.base, own, index))


@moves_turned(views.unbind)
def unbind(x: Turned, dim: int = 0) -> list[Any]:
    at, own = dense_dim(x, dim)
    return [without(x, at, part) for part in sparse_movement.unbind(x.base, own)]


@moves_turned(views.slice)
def slice(x: Turned, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    _, own = dense_dim(x, dim)
    return x.like(sparse_movement.slice(x.base, own, start, end, step))


@moves_turned(views.split_with_sizes)
def split_with_sizes(x: Turned, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    _, own = dense_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split_with_sizes(x.base, split_sizes, own)]


@moves_turned(views.split)
def split(x: Turned, split_size: int, dim: int = 0) -> list[Any]:
    _, own = dense_dim(x, dim)
    return [x.like(part) for part in sparse_movement.split(x.base, split_size, own)]


@moves_turned(joins.cat)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    by = next(x for x in tensors if isinstance(x, Turned))
    _, own = dense_dim(by, dim)
    if not all(isinstance(x, Turned) for x in tensors):
        raise NotLowered("they are not all stored alike")
    return by.like(sparse_movement.cat([turned_back(x, by) for x in tensors], own))
