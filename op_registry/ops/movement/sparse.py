"""Movement on sparse storage: stored elements get other places, and nothing that is not stored is looked at.

Law: as views.py, movement.py and joins.py have it for dense storage: an element moves with its validity. An operator
that mixes sparse with dense dimensions, or writes elements of its own, has no sparse form here. Results keep the layout
of the input where they have the two sparse dimensions that it takes, and are COO where not. What moves dense dimensions
only leaves the pattern as it is, the same object, so that its operands and its result still meet for free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    PACKED,
    Coordinates,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    call,
    concat_values,
    expand_sparse,
    lowers,
    map_dense_dim,
    ravel,
    refuse_dense_dims,
    repeat_sparse,
    unravel,
    with_coordinates,
    without_block_padding,
    wrap_dim,
)
from op_registry.ops.movement import joins, views
from op_registry.ops.movement import rules as movement

aten = torch.ops.aten


def parts_of_dense(x: Sparse, dim: int, divide: Callable[[Tensor, int], Sequence[Tensor]]) -> list[Any]:
    """A division of one dense dimension, in one step: its derivative is one step too."""
    at = dim - x.pattern.ndim + x.pattern.lead
    pieces, v = divide(x.values.data, at), x.values.full_validity
    validities = [None] * len(pieces) if v is None else divide(v, at)
    return [x.like(Dense(piece, part)) for piece, part in zip(pieces, validities, strict=True)]


# ---------------------------------------------------------------------------------------------- order of dimensions


@lowers(views.permute)
def permute(x: Sparse, dims: Sequence[int]) -> Any:
    order = [wrap_dim(d, x.ndim) for d in dims]
    if len(set(order)) != x.ndim or len(order) != x.ndim:
        torch.empty(x.shape, device="meta").permute(tuple(dims))  # raises torch's error
    return in_order_of(x, order)


def in_order_of(x: Sparse, order: Sequence[int]) -> Any:
    """The dimensions of `x` in another order, none negative."""
    sparse = x.pattern.ndim
    if list(order[:sparse]) == list(range(sparse)):
        inner = [*range(x.pattern.lead), *(d - sparse + x.pattern.lead for d in order[sparse:])]
        return x.like(x.values.map(lambda t: t.permute(inner))) if list(order) != list(range(x.ndim)) else x
    if set(order[:sparse]) != set(range(sparse)):
        return Permuted(x, order)
    flat, places = without_block_padding(x)
    inner = [0, *(d - sparse + 1 for d in order[sparse:])]
    moved = flat.map(lambda t: t.permute(inner))
    return with_coordinates(x, [places[d] for d in order[:sparse]], moved, [x.pattern.sizes[d] for d in order[:sparse]])


@lowers(views.transpose)
def transpose(x: Sparse, dim0: int, dim1: int) -> Any:
    order = list(range(x.ndim))
    a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lowers(views.t)
def t(x: Sparse) -> Any:
    if x.ndim > 2:
        torch.empty(x.shape, device="meta").t()  # raises torch's error
    return permute(x, list(range(x.ndim))[::-1])


@lowers(views.unsqueeze)
def unsqueeze(x: Sparse, dim: int) -> Any:
    at = wrap_dim(dim, x.ndim + 1)
    if at > x.pattern.ndim or (at == x.pattern.ndim and x.dense_sizes):
        return map_dense_dim(x, at, lambda t, d: t.unsqueeze(d))
    flat, places = without_block_padding(x)
    zeros = torch.zeros_like(places[0])
    sizes = x.pattern.sizes
    return with_coordinates(x, (*places[:at], zeros, *places[at:]), flat, (*sizes[:at], 1, *sizes[at:]))


@lowers(views.squeeze)
def squeeze(x: Sparse, dim: int | Sequence[int] | None = None) -> Any:
    asked = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for d in (wrap_dim(d, x.ndim) for d in asked) if x.shape[d] == 1}
    sparse = x.pattern.ndim
    if not any(d < sparse for d in gone):
        dense = [d - sparse + x.pattern.lead for d in sorted(gone)]
        return x.like(x.values.map(lambda t: t.squeeze(dense))) if dense else x
    flat, places = without_block_padding(x)
    inner = [d - sparse + 1 for d in sorted(gone) if d >= sparse]
    flat = flat.map(lambda t: t.squeeze(inner)) if inner else flat
    kept = [d for d in range(sparse) if d not in gone]
    return with_coordinates(x, [places[d] for d in kept], flat, [x.pattern.sizes[d] for d in kept])


@lowers(views.view)
def view(x: Sparse, size: Sequence[int]) -> Any:
    shape = tuple(size)
    if -1 in shape or math.prod(shape) != math.prod(x.shape):
        shape = tuple(torch.empty(x.shape, device="meta").reshape(shape).shape)  # or torch's error
    sparse, dense = x.pattern.ndim, len(x.dense_sizes)
    if shape[:sparse] == x.pattern.sizes and math.prod(shape[sparse:]) == math.prod(x.dense_sizes):
        return x.like(x.values.map(lambda t: t.reshape(*t.shape[: x.pattern.lead], *shape[sparse:])))
    kept = len(shape) - dense
    if dense and shape[kept:] != x.dense_sizes:
        raise NotLowered("it would mix sparse with dense dimensions")
    if kept < 1 or 0 in shape:
        raise NotLowered("no sparse dimension is left")
    if x.pattern.layout in (torch.sparse_coo, torch.sparse_csr, PACKED):
        # These list elements in the order of their positions, which a view does not change.
        fits = kept == 2 or (kept > 2 and x.pattern.layout is not PACKED)
        return Sparse(x.values, x.pattern.viewed(shape[:kept], x.pattern.layout if fits else torch.sparse_coo))
    flat, places = without_block_padding(x)
    at = ravel(places, x.pattern.sizes[:sparse])
    return with_coordinates(x, unravel(at, shape[:kept]), flat, shape[:kept])


# ------------------------------------------------------------------------------------------------------ parts of it


def filtered(x: Sparse, dim: int, keep: Callable[[Tensor], tuple[Tensor, Tensor]], size: int | None) -> Any:
    """The elements that `keep` keeps by their place in `dim`, at the place that it gives them; without `dim`: None."""
    flat, places = without_block_padding(x)
    kept, moved = keep(places[dim])
    index = kept.nonzero()[:, 0]
    others: list[Tensor] = [p[index] for p in places]
    sizes = list(x.pattern.sizes)
    if size is None:
        del others[dim], sizes[dim]
    else:
        others[dim], sizes[dim] = moved[index], size
    return with_coordinates(x, others, flat.take_rows(index), sizes)


@lowers(views.select)
def select(x: Sparse, dim: int, index: int) -> Any:
    at = wrap_dim(dim, x.ndim)
    torch.empty(x.shape, device="meta").select(at, index)  # raises torch's error
    if at >= x.pattern.ndim:
        return map_dense_dim(x, at, lambda t, d: t.select(d, index))
    wanted = index % x.shape[at]
    if x.pattern.ndim == 1:
        return x.at((torch.full((1,), wanted, device=x.device),)).map(lambda t: t[0])
    return filtered(x, at, lambda p: (p == wanted, p), None)


@lowers(views.slice)
def slice(x: Sparse, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    at = wrap_dim(dim, x.ndim)
    if at >= x.pattern.ndim:
        return map_dense_dim(x, at, lambda t, d: aten.slice.Tensor(t, d, start, end, step))
    size = torch.empty(x.shape[at], device="meta")
    count = aten.slice.Tensor(size, 0, start, end, step).shape[0]
    first = range(x.shape[at])[start:end:step][0] if count else 0

    def keep(p: Tensor) -> tuple[Tensor, Tensor]:
        moved = (p - first) // step
        return ((p - first) % step == 0) & (moved >= 0) & (moved < count), moved

    return filtered(x, at, keep, count)


@lowers(views.narrow_copy)
def narrow_copy(x: Sparse, dim: int, start: int, length: int) -> Any:
    return slice(x, dim, start, start + length)


@lowers(views.split_with_sizes)
def split_with_sizes(x: Sparse, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    torch.empty(x.shape, device="meta").split_with_sizes(list(split_sizes), dim)  # raises torch's error
    at = wrap_dim(dim, x.ndim)
    if at >= x.pattern.ndim:
        return parts_of_dense(x, at, lambda t, d: t.split_with_sizes(list(split_sizes), d))
    starts = [sum(split_sizes[:n]) for n in range(len(split_sizes))]
    return [slice(x, dim, start, start + size) for start, size in zip(starts, split_sizes, strict=True)]


@lowers(views.split)
def split(x: Sparse, split_size: int, dim: int = 0) -> list[Any]:
    pieces = torch.empty(x.shape, device="meta").split(split_size, dim)
    return split_with_sizes(x, [piece.shape[dim] for piece in pieces], dim)


@lowers(views.unbind)
def unbind(x: Sparse, dim: int = 0) -> list[Any]:
    at = wrap_dim(dim, x.ndim)
    if at >= x.pattern.ndim:
        return parts_of_dense(x, at, lambda t, d: t.unbind(d))
    return [select(x, at, index) for index in range(x.shape[at])]


@lowers(views.diagonal)
def diagonal(x: Sparse, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    refuse_dense_dims(x)
    a, b = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    length = torch.empty(x.shape, device="meta").diagonal(offset, dim1, dim2).shape[-1]
    flat, places = without_block_padding(x)
    index = (places[b] - places[a] == offset).nonzero()[:, 0]
    along = torch.minimum(places[a], places[b])[index]
    others = [places[d][index] for d in range(x.ndim) if d not in (a, b)]
    sizes = [size for d, size in enumerate(x.shape) if d not in (a, b)]
    return with_coordinates(x, [*others, along], flat.take_rows(index), [*sizes, length])


# --------------------------------------------------------------------------------------------------- round and again


def flip(x: Sparse, *given: Any, dims: Sequence[int] = ()) -> Any:
    if len(given) != 1 or isinstance(given[0], int):
        raise NotLowered("a quarter turn is no flip")
    del dims  # of a quarter turn
    turned = {wrap_dim(d, x.ndim) for d in given[0]}
    sparse = x.pattern.ndim
    if not any(d < sparse for d in turned):
        dense = [d - sparse + x.pattern.lead for d in turned]
        return x.like(x.values.map(lambda t: t.flip(dense)))
    flat, places = without_block_padding(x)
    inner = [d - sparse + 1 for d in turned if d >= sparse]
    flat = flat.map(lambda t: t.flip(inner)) if inner else flat
    return with_coordinates(
        x, [x.shape[d] - 1 - p if d in turned else p for d, p in enumerate(places)], flat, x.pattern.sizes
    )


@lowers(movement.roll)
def roll(x: Sparse, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    given = [shifts] if isinstance(shifts, int) else list(shifts)
    along = [wrap_dim(d, x.ndim) for d in ([dims] if isinstance(dims, int) else dims)]
    if along and len(given) == len(along) and not any(d < x.pattern.ndim for d in along):
        return x.like(x.values.map(lambda t: t.roll(given, [d - x.pattern.ndim + x.pattern.lead for d in along])))
    flat, places = without_block_padding(x)
    if not along:
        refuse_dense_dims(x)
        at = (ravel(places, x.pattern.sizes) + given[0]) % max(math.prod(x.shape), 1)
        return with_coordinates(x, unravel(at, x.pattern.sizes), flat, x.pattern.sizes)
    moved: list[Tensor] = list(places)
    for shift, dim in zip(given, along, strict=True):
        at_dim = wrap_dim(dim, x.ndim)
        if at_dim >= x.pattern.ndim:
            raise NotLowered("it rolls dense dimensions")
        moved[at_dim] = (moved[at_dim] + shift) % max(x.shape[at_dim], 1)
    return with_coordinates(x, moved, flat, x.pattern.sizes)


@lowers(movement.repeat)
def repeat(x: Sparse, repeats: Sequence[int]) -> Any:
    refuse_dense_dims(x)
    new = len(repeats) - x.ndim
    if new < 0 or 0 in repeats:
        raise NotLowered("it repeats nothing")
    return repeat_sparse(x, list(repeats), new)


@lowers(views.expand)
def expand(x: Sparse, size: Sequence[int], *, implicit: bool = False) -> Sparse:
    return expand_sparse(x, size)


# ------------------------------------------------------------------------------------------------------------ joins


@lowers(joins.cat)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    first = tensors[0]
    if any(x.ndim != first.ndim for x in tensors):
        raise NotLowered("they have different numbers of dimensions")
    at = wrap_dim(dim, first.ndim)
    alike = {(x.ndim, x.pattern.ndim, tuple(n for d, n in enumerate(x.shape) if d != at)) for x in tensors}
    if len(alike) > 1:
        raise NotLowered("they are not stored alike")
    if at >= first.pattern.ndim:
        if not all(x.pattern.same_as(first.pattern) for x in tensors):
            raise NotLowered("they are joined along a dense dimension, and do not share a pattern")
        return first.like(concat_values([x.values for x in tensors], at - first.pattern.ndim + first.pattern.lead))
    dtype = torch.empty(0, dtype=first.dtype)
    for x in tensors[1:]:
        dtype = dtype.to(torch.promote_types(dtype.dtype, x.dtype))
    parts = [without_block_padding(x) for x in tensors]
    starts = [sum(x.shape[at] for x in tensors[:n]) for n in range(len(tensors))]
    places: list[Coordinates] = [
        tuple(p + start if d == at else p for d, p in enumerate(part))
        for (_, part), start in zip(parts, starts, strict=True)
    ]
    flat = concat_values([Dense(f.data.to(dtype.dtype), f.validity) for f, _ in parts])
    sizes = [sum(x.shape[at] for x in tensors) if d == at else n for d, n in enumerate(first.pattern.sizes)]
    return with_coordinates(first, [torch.cat(p) for p in zip(*places, strict=True)], flat, sizes)


@lowers(joins.stack)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    if len({tuple(x.shape) for x in tensors}) > 1:
        raise NotLowered("they are of different shapes")
    at = wrap_dim(dim, tensors[0].ndim + 1)
    return cat([unsqueeze(x, at) for x in tensors], at)


@lowers(views.view_as_real)
def view_as_real(x: Sparse) -> Sparse:
    """Two numbers for each that is stored: a dense dimension behind the others."""
    v = x.values.full_validity
    data = torch.view_as_real(x.values.data)
    return x.like(Dense(data, None if v is None else v.unsqueeze(-1).expand(data.shape)))


@lowers(views.view_as_complex)
def view_as_complex(x: Sparse) -> Any:
    torch.view_as_complex(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # raises torch's errors
    if x.ndim < 2:
        raise NotLowered("no sparse dimension is left")
    real, imaginary = (call(aten.select.int, x, -1, n) for n in (0, 1))
    return call(aten.complex.default, real, imaginary)


def rot90(op: OpOverload, x: Any, *args: Any) -> Any:
    if op is not aten.rot90.default:
        raise NotLowered("it is no quarter turn")
    times, dims = (args[0] if args else 1) % 4, list(args[1]) if len(args) > 1 else [0, 1]
    aten.rot90(torch.empty(x.shape, device="meta"), times, dims)  # raises torch's errors
    a, b = (d % x.ndim for d in dims)
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    if times == 0:
        return x.like(x.values.map(torch.clone))
    if times == 2:
        return _flipped(x, [a, b])
    turned = _flipped(x, [b]) if times == 1 else in_order_of(x, order)
    if not isinstance(turned, Sparse):
        raise NotLowered("it turns dense dimensions before sparse ones")
    return in_order_of(turned, order) if times == 1 else _flipped(turned, [b])


def _flipped(x: Sparse, dims: Sequence[int]) -> Any:
    return flip(x, list(dims))
