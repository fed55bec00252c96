"""Movement on sparse storage: stored elements get new coordinates; elements that are not stored are never visited.

Law: as for dense storage (views.py, rules.py, joins.py), an element moves with its validity. An operator that mixes
sparse with dense dimensions, or writes elements of its own, has no lowering here. A result keeps the input's layout if
that has room for the result's sparse dimensions; otherwise it is COO. A move of dense dimensions alone reuses the
pattern object, so that aligning its result with its operand costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    AnyRecord,
    Coordinates,
    Dense,
    Groups,
    NotLowered,
    Permuted,
    Sparse,
    being_traced,
    call,
    concat_values,
    expand_sparse,
    keeps_dims_in_view,
    lowers,
    map_dense_dim,
    one_element_but_along,
    order_of,
    ravel,
    refuse_dense_dims,
    repeat_sparse,
    shape_alone,
    sparse_dims_first,
    unpadded_elements,
    unravel,
    with_coordinates,
    with_sparse_dims,
    wrap_dim,
)
from op_registry.ops.movement import joins, views
from op_registry.ops.movement import rules as movement
from op_registry.ops.movement.regroup import regroup

aten = torch.ops.aten


def divide_dense_dim(x: Sparse, dim: int, divide: Callable[[Tensor, int], Sequence[Tensor]]) -> list[Sparse]:
    """One dense dimension divided by a single call of `divide`, so that its backward is a single node too."""
    values_dim = dim - x.pattern.ndim + x.pattern.lead
    pieces, v = divide(x.values.data, values_dim), x.values.full_validity
    validities = [None] * len(pieces) if v is None else divide(v, values_dim)
    return [x.like(Dense(piece, part)) for piece, part in zip(pieces, validities, strict=True)]


# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers(views.permute)
def permute(x: Sparse, dims: Sequence[int]) -> Any:
    order = [wrap_dim(d, x.ndim) for d in dims]
    if len(set(order)) != x.ndim or len(order) != x.ndim:
        shape_alone(x.shape).permute(tuple(dims))  # raises torch's error
    return in_order_of(x, order)


def in_order_of(x: Sparse, order: Sequence[int]) -> Sparse | Permuted:
    """`x` with its dimensions permuted; none of `order` is negative."""
    return shown_as(x, [(d,) for d in order])


def shown_as(x: Sparse, groups: Sequence[Sequence[int]]) -> Sparse | Permuted:
    """`x` with its dimensions in the order of `groups`, the dimensions of a group merged into one."""
    sparse = x.pattern.ndim
    listed = [d for group in groups for d in group]
    dense = [d for d in listed if d >= sparse]
    if dense != sorted(dense):
        inner = [*range(x.pattern.lead), *(d - sparse + x.pattern.lead for d in dense)]
        x = x.like(x.values.map(lambda t: t.permute(inner)))
        new = {d: sparse + n for n, d in enumerate(dense)} | {d: d for d in range(sparse)}
        groups, listed = [[new[d] for d in group] for group in groups], [new[d] for d in listed]
    merged = len(groups) < len(listed)
    if listed == list(range(x.ndim)) and not merged:
        return x
    if merged or set(listed[:sparse]) != set(range(sparse)) or keeps_dims_in_view(x.pattern):
        return Permuted(x, order_of(groups))
    flat, coordinates = unpadded_elements(x)
    order = listed[:sparse]
    return with_coordinates(x, [coordinates[d] for d in order], flat, [x.pattern.sizes[d] for d in order])


def viewed(x: Sparse, groups: Sequence[Sequence[int]], shape: Sequence[int]) -> Sparse | Permuted:
    """`x`, shown in `groups`, in another shape; NotLowered if that divides a sparse dimension."""
    shown = shown_as(x, groups)  # with its dense dimensions in the order in which they are shown
    x, shown_groups = (shown.base, shown.groups) if isinstance(shown, Permuted) else (shown, _singly(shown.ndim))
    new_groups, dense_sizes = regroup(shown_groups, x.shape, x.pattern.ndim, shape)
    if any(len(group) > 1 for group in new_groups) and not keeps_dims_in_view(x.pattern):
        raise NotLowered("it would merge sparse dimensions, or mix them with dense ones")
    lead = x.pattern.lead
    return shown_as(x.like(x.values.map(lambda t: t.reshape(*t.shape[:lead], *dense_sizes))), new_groups)


def _singly(ndim: int) -> Groups:
    """Every dimension by itself, in order."""
    return tuple((d,) for d in range(ndim))


@lowers(views.transpose)
def transpose(x: Sparse, dim0: int, dim1: int) -> Any:
    order = list(range(x.ndim))
    a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@lowers(views.t)
def t(x: Sparse) -> Any:
    if x.ndim > 2:
        shape_alone(x.shape).t()  # raises torch's error
    return permute(x, list(range(x.ndim))[::-1])


@lowers(views.unsqueeze)
def unsqueeze(x: Sparse, dim: int) -> Sparse | Permuted:
    dim = wrap_dim(dim, x.ndim + 1)
    if dim > x.pattern.ndim or (dim == x.pattern.ndim and x.dense_sizes):
        return map_dense_dim(x, dim, lambda t, d: t.unsqueeze(d))
    if keeps_dims_in_view(x.pattern):  # a dense dimension of the base, shown at `dim`
        base = x.like(x.values.map(lambda t: t.unsqueeze(-1)))
        return in_order_of(base, [*range(dim), x.ndim, *range(dim, x.ndim)])
    flat, coordinates = unpadded_elements(x)
    zeros = torch.zeros_like(coordinates[0])
    sizes = x.pattern.sizes
    return with_coordinates(x, (*coordinates[:dim], zeros, *coordinates[dim:]), flat, (*sizes[:dim], 1, *sizes[dim:]))


@lowers(views.squeeze)
def squeeze(x: Sparse, dim: int | Sequence[int] | None = None) -> Sparse:
    candidates = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    removed = {d for d in (wrap_dim(d, x.ndim) for d in candidates) if x.shape[d] == 1}
    sparse = x.pattern.ndim
    if not any(d < sparse for d in removed):
        dense = [d - sparse + x.pattern.lead for d in sorted(removed)]
        return x.like(x.values.map(lambda t: t.squeeze(dense))) if dense else x
    flat, coordinates = unpadded_elements(x)
    inner = [d - sparse + 1 for d in sorted(removed) if d >= sparse]
    flat = flat.map(lambda t: t.squeeze(inner)) if inner else flat
    kept = [d for d in range(sparse) if d not in removed]
    return with_coordinates(x, [coordinates[d] for d in kept], flat, [x.pattern.sizes[d] for d in kept])


def shape_of_view(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """`size` without a -1; torch's error where it does not fit the shape."""
    if -1 in size or math.prod(size) != math.prod(shape):
        return tuple(shape_alone(tuple(shape)).reshape(tuple(size)).shape)
    return tuple(size)


@lowers(views.view)
def view(x: Sparse, size: Sequence[int]) -> Sparse | Permuted:
    shape = shape_of_view(x.shape, size)
    sparse, dense = x.pattern.ndim, len(x.dense_sizes)
    if shape[:sparse] == x.pattern.sizes and math.prod(shape[sparse:]) == math.prod(x.dense_sizes):
        return x.like(x.values.map(lambda t: t.reshape(*t.shape[: x.pattern.lead], *shape[sparse:])))
    if keeps_dims_in_view(x.pattern):
        with contextlib.suppress(NotLowered):
            return viewed(x, _singly(x.ndim), shape)
    new_sparse = len(shape) - dense
    if dense and shape[new_sparse:] != x.dense_sizes:
        raise NotLowered("it would mix sparse with dense dimensions")
    if new_sparse < 1 or 0 in shape:
        raise NotLowered("no sparse dimension is left")
    if x.pattern.layout.row_major:  # a view does not change that order
        return Sparse(x.values, x.pattern.viewed(shape[:new_sparse], x.pattern.layout.with_room(new_sparse)))
    flat, coordinates = unpadded_elements(x)
    offsets = ravel(coordinates, x.pattern.sizes[:sparse])
    return with_coordinates(x, unravel(offsets, shape[:new_sparse]), flat, shape[:new_sparse])


# -------------------------------------------------------------------------------------------------------------- parts


def filtered(x: Sparse, dim: int, choose: Callable[[Tensor], tuple[Tensor, Tensor]], size: int | None) -> Sparse:
    """The elements chosen by their coordinate in `dim`.

    choose  given those coordinates, says which of them are kept, and the new coordinate of each
    size    the new size of `dim`; None removes it
    """
    flat, coordinates = unpadded_elements(x)
    kept, moved = choose(coordinates[dim])
    index = kept.nonzero()[:, 0]
    new_coordinates: list[Tensor] = [c[index] for c in coordinates]
    sizes = list(x.pattern.sizes)
    if size is None:
        del new_coordinates[dim], sizes[dim]
    else:
        new_coordinates[dim], sizes[dim] = moved[index], size
    return with_coordinates(x, new_coordinates, flat.take_rows(index), sizes)


@lowers(views.select)
def select(x: Sparse, dim: int, index: int) -> Any:
    dim = wrap_dim(dim, x.ndim)
    shape_alone(x.shape).select(dim, index)  # raises torch's error
    if dim >= x.pattern.ndim:
        return map_dense_dim(x, dim, lambda t, d: t.select(d, index))
    wanted = index % x.shape[dim]
    if x.pattern.ndim == 1:
        return x.at((torch.full((1,), wanted, device=x.device),)).map(lambda t: t[0])
    return filtered(x, dim, lambda c: (c == wanted, c), None)


@lowers(views.slice)
def slice(x: Sparse, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Sparse:
    dim = wrap_dim(dim, x.ndim)
    if dim >= x.pattern.ndim:
        return map_dense_dim(x, dim, lambda t, d: aten.slice.Tensor(t, d, start, end, step))
    indices = shape_alone(x.shape[dim])
    count = aten.slice.Tensor(indices, 0, start, end, step).shape[0]
    first = range(x.shape[dim])[start:end:step][0] if count else 0

    def choose(c: Tensor) -> tuple[Tensor, Tensor]:
        moved = (c - first) // step
        return ((c - first) % step == 0) & (moved >= 0) & (moved < count), moved

    return filtered(x, dim, choose, count)


@lowers(views.narrow_copy)
def narrow_copy(x: Sparse, dim: int, start: int, length: int) -> Sparse:
    return slice(x, dim, start, start + length)


@lowers(views.unsafe_split_with_sizes)
@lowers(views.split_with_sizes)
def split_with_sizes(x: Sparse, split_sizes: Sequence[int], dim: int = 0) -> list[Sparse]:
    shape_alone(x.shape).split_with_sizes(list(split_sizes), dim)  # raises torch's error
    dim = wrap_dim(dim, x.ndim)
    if dim >= x.pattern.ndim:
        return divide_dense_dim(x, dim, lambda t, d: t.split_with_sizes(list(split_sizes), d))
    starts = [sum(split_sizes[:n]) for n in range(len(split_sizes))]
    return [slice(x, dim, start, start + size) for start, size in zip(starts, split_sizes, strict=True)]


@lowers(views.unsafe_split)
@lowers(views.split)
def split(x: Sparse, split_size: int, dim: int = 0) -> list[Sparse]:
    pieces = shape_alone(x.shape).split(split_size, dim)
    return split_with_sizes(x, [piece.shape[dim] for piece in pieces], dim)


@lowers(views.unbind)
def unbind(x: Sparse, dim: int = 0) -> list[Any]:
    dim = wrap_dim(dim, x.ndim)
    if dim >= x.pattern.ndim:
        return divide_dense_dim(x, dim, lambda t, d: t.unbind(d))
    return [select(x, dim, index) for index in range(x.shape[dim])]


@lowers(views.diagonal)
def diagonal(x: Sparse, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Sparse:
    refuse_dense_dims(x)
    a, b = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    length = shape_alone(x.shape).diagonal(offset, dim1, dim2).shape[-1]
    flat, coordinates = unpadded_elements(x)
    index = (coordinates[b] - coordinates[a] == offset).nonzero()[:, 0]
    diagonal_coordinate = torch.minimum(coordinates[a], coordinates[b])[index]
    others = [coordinates[d][index] for d in range(x.ndim) if d not in (a, b)]
    sizes = [size for d, size in enumerate(x.shape) if d not in (a, b)]
    return with_coordinates(x, [*others, diagonal_coordinate], flat.take_rows(index), [*sizes, length])


# ---------------------------------------------------------------------------------------------- flips, rolls, repeats


@movement.flip.lowering(Sparse)
def flip(op: OpOverload, x: Sparse, *args: Any, **kwargs: Any) -> Sparse | Permuted:
    return _rot90(x, *args, **kwargs) if op is aten.rot90.default else _flip(x, *args, **kwargs)


def _flip(x: Sparse, dims: Sequence[int]) -> Sparse:
    flipped = {wrap_dim(d, x.ndim) for d in dims}
    sparse = x.pattern.ndim
    if not any(d < sparse for d in flipped):
        dense = [d - sparse + x.pattern.lead for d in flipped]
        return x.like(x.values.map(lambda t: t.flip(dense)))
    flat, coordinates = unpadded_elements(x)
    inner = [d - sparse + 1 for d in flipped if d >= sparse]
    flat = flat.map(lambda t: t.flip(inner)) if inner else flat
    return with_coordinates(
        x, [x.shape[d] - 1 - c if d in flipped else c for d, c in enumerate(coordinates)], flat, x.pattern.sizes
    )


def _rot90(x: Sparse, k: int = 1, dims: Sequence[int] = (0, 1)) -> Sparse | Permuted:
    """A rotation by 90° is a transposition and a flip."""
    k %= 4
    aten.rot90(shape_alone(x.shape), k, list(dims))  # raises torch's errors
    a, b = (d % x.ndim for d in dims)
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    if k == 0:
        return x.like(x.values.map(torch.clone))
    if k == 2:
        return _flip(x, [a, b])
    if k == 1:
        return in_order_of(_flip(x, [b]), order)
    transposed = in_order_of(x, order)
    if isinstance(transposed, Permuted):
        transposed = sparse_dims_first(transposed)
    return _flip(transposed, [b])


@lowers(movement.roll)
def roll(x: Sparse, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Sparse:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [wrap_dim(d, x.ndim) for d in ([dims] if isinstance(dims, int) else dims)]
    if dims and len(shifts) == len(dims) and not any(d < x.pattern.ndim for d in dims):
        values_dims = [d - x.pattern.ndim + x.pattern.lead for d in dims]
        return x.like(x.values.map(lambda t: t.roll(shifts, values_dims)))
    flat, coordinates = unpadded_elements(x)
    if not dims:
        refuse_dense_dims(x)
        offsets = (ravel(coordinates, x.pattern.sizes) + shifts[0]) % max(math.prod(x.shape), 1)
        return with_coordinates(x, unravel(offsets, x.pattern.sizes), flat, x.pattern.sizes)
    moved: list[Tensor] = list(coordinates)
    for shift, dim in zip(shifts, dims, strict=True):
        if dim >= x.pattern.ndim:
            raise NotLowered("it rolls sparse and dense dimensions at once")
        moved[dim] = (moved[dim] + shift) % max(x.shape[dim], 1)
    return with_coordinates(x, moved, flat, x.pattern.sizes)


@lowers(movement.repeat)
def repeat(x: Sparse, repeats: Sequence[int]) -> Sparse:
    refuse_dense_dims(x)
    new = len(repeats) - x.ndim
    if new < 0 or 0 in repeats:
        raise NotLowered("its result is empty, or it has fewer repeats than dimensions")
    return repeat_sparse(x, list(repeats), new)


@lowers(views.expand)
def expand(x: Sparse, size: Sequence[int], *, implicit: bool = False) -> Sparse:
    return expand_sparse(x, size)


# -------------------------------------------------------------------------------------------------------------- joins


def without_empty(tensors: Sequence[AnyRecord]) -> list[AnyRecord]:
    """The operands of `cat` without plain ones of shape (0,), which torch.cat leaves out beside any others."""
    types = {x.dtype for x in tensors if not isinstance(x, Dense)}
    return [x for x in tensors if not (isinstance(x, Dense) and tuple(x.shape) == (0,) and types == {x.dtype})]


@joins.cat.lowering(Sparse)
def cat_of_stored(op: OpOverload, tensors: Sequence[AnyRecord], dim: int = 0) -> Sparse:
    kept = without_empty(tensors)
    if not all(isinstance(x, Sparse) for x in kept):
        raise NotLowered("an operand whose elements would be moved is stored densely")
    return cat(kept, dim)  # type: ignore[arg-type]


def cat(tensors: Sequence[Sparse], dim: int = 0) -> Sparse:
    first = tensors[0]
    if len(tensors) == 1:
        return first.like(first.values.map(torch.clone))
    if any(x.ndim != first.ndim for x in tensors):
        raise NotLowered("its operands have different numbers of dimensions")
    dim = wrap_dim(dim, first.ndim)
    forms = {(x.ndim, x.pattern.ndim, tuple(n for d, n in enumerate(x.shape) if d != dim)) for x in tensors}
    if len(forms) > 1:
        raise NotLowered("its operands differ in their sparse dimensions, or in shape")
    if dim >= first.pattern.ndim:
        if not all(x.pattern.same_as(first.pattern) for x in tensors):
            if any(being_traced(x.values.data) for x in tensors):
                raise NotLowered("it joins along a dense dimension, and its operands do not share a sparsity pattern")
            return cat([with_sparse_dims(x, dim + 1) for x in tensors], dim)
        return first.like(concat_values([x.values for x in tensors], dim - first.pattern.ndim + first.pattern.lead))
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    parts = [unpadded_elements(x) for x in tensors]
    starts = [sum(x.shape[dim] for x in tensors[:n]) for n in range(len(tensors))]
    coordinates: list[Coordinates] = [
        tuple(c + start if d == dim else c for d, c in enumerate(own))
        for (_, own), start in zip(parts, starts, strict=True)
    ]
    flat = concat_values([Dense(f.data.to(dtype), f.validity) for f, _ in parts])
    sizes = [sum(x.shape[dim] for x in tensors) if d == dim else n for d, n in enumerate(first.pattern.sizes)]
    return with_coordinates(first, [torch.cat(c) for c in zip(*coordinates, strict=True)], flat, sizes)


@lowers(joins.stack)
def stack(tensors: Sequence[Sparse], dim: int = 0) -> Sparse:
    if len({tuple(x.shape) for x in tensors}) > 1:
        raise NotLowered("its operands have different shapes")
    dim = wrap_dim(dim, tensors[0].ndim + 1)
    return joined([unsqueeze(x, dim) for x in tensors], dim)


def joined(parts: Sequence[Sparse | Permuted], dim: int) -> Any:
    """`cat` of records that were shown with a new dimension."""
    return call(aten.cat.default, parts, dim)


def conj(op: OpOverload, x: Sparse | Permuted) -> Any:
    """Compute the conjugate, as torch does for its sparse tensors: stored values carry no conjugate bit."""
    return call(aten._conj_physical.default if "conj" in op._schema.name else aten.neg.default, x)


views.conj.lowering(Sparse)(conj)
views.conj.lowering(Permuted)(conj)


@lowers(views.view_as_real)
def view_as_real(x: Sparse) -> Sparse:
    """Real and imaginary part in a new dense dimension, the last one."""
    v = x.values.full_validity
    data = torch.view_as_real(x.values.data.resolve_conj())
    return x.like(Dense(data, None if v is None else v.unsqueeze(-1).expand(data.shape)))


@lowers(views.view_as_complex)
def view_as_complex(x: Sparse | Permuted) -> Any:
    few = one_element_but_along(x.shape, -1)
    torch.view_as_complex(torch.empty(few, dtype=x.dtype, device="meta"))  # raises torch's errors
    if x.ndim < 2:
        raise NotLowered("no sparse dimension is left")
    real, imaginary = (call(aten.select.int, x, -1, n) for n in (0, 1))
    return call(aten.complex.default, real, imaginary)


views.view_as_complex.lowering(Permuted)(lambda op, x: view_as_complex(x))


@views.view_as_real.lowering(Permuted)
def view_as_real_in_order(op: OpOverload, x: Permuted) -> Permuted:
    return Permuted(view_as_real(x.base), (*x.order, x.base.ndim))
