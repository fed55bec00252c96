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
    NotLowered,
    Permuted,
    Sparse,
    call,
    ravel,
    shape_alone,
    shown,
    unravel,
    wrap_dim,
)
from op_registry.ops.movement import joins, views
from op_registry.ops.movement import rules as movement
from op_registry.records.arguments import one_element_but_along
from op_registry.records.layout import regrouped
from op_registry.sparse.convert import (
    concat_values,
    expand_sparse,
    repeat_sparse,
    unpadded_elements,
    with_coordinates,
    with_sparse_dims,
)
from op_registry.sparse.on_values import ON_STORED_ROWS, lowers, map_dense_dim
from op_registry.sparse.permuted import Groups, keeps_dims_in_view, shown_as, sparse_dims_first, to_base_order
from op_registry.sparse.slicewise import ALONG_BASE_DIM, shown_without

aten = torch.ops.aten


def divide_dense_dim(x: Sparse, dim: int, divide: Callable[[Tensor, int], Sequence[Tensor]]) -> list[Sparse]:
    """One dense dimension divided by a single call of `divide`, so that its backward is a single node too."""
    values_dim = dim - x.pattern.ndim + x.pattern.lead
    pieces, v = divide(x.values.data, values_dim), x.values.full_validity
    validities = [None] * len(pieces) if v is None else divide(v, values_dim)
    return [x.like(Dense(piece, part)) for piece, part in zip(pieces, validities, strict=True)]


# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers(views.permute, Sparse, Permuted)
def permute(x: Sparse | Permuted, dims: Sequence[int]) -> Sparse | Permuted:
    order = [wrap_dim(d, x.ndim) for d in dims]
    if sorted(order) != list(range(x.ndim)):
        shape_alone(x.shape).permute(tuple(dims))  # raises torch's error
    return in_order_of(x, order)


def in_order_of(x: Sparse | Permuted, order: Sequence[int]) -> Sparse | Permuted:
    """`x` with its dimensions permuted; none of `order` is negative."""
    base, groups = shown(x)
    return shown_as(base, [groups[d] for d in order])


def viewed(x: Sparse | Permuted, shape: Sequence[int]) -> Sparse | Permuted:
    """`x` in another shape, no sparse dimension divided."""
    x, groups = shown(shown_as(*shown(x)))  # with its dense dimensions in the order in which they are shown
    found = regroup(groups, x.shape, x.pattern.ndim, shape)
    if found is None or not (keeps_dims_in_view(x.pattern) or all(len(group) < 2 for group in found[0])):
        raise NotLowered("it would divide or merge sparse dimensions, or mix them with dense ones in several places")
    groups, dense_sizes = found
    return shown_as(x.like(x.values.map(lambda t: t.reshape(*t.shape[: x.pattern.lead], *dense_sizes))), groups)


@lowers(views.transpose, Sparse, Permuted)
def transpose(x: Sparse | Permuted, dim0: int, dim1: int) -> Sparse | Permuted:
    order = list(range(x.ndim))
    a, b = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[a], order[b] = order[b], order[a]
    return in_order_of(x, order)


@lowers(views.t, Sparse, Permuted)
def t(x: Sparse | Permuted) -> Sparse | Permuted:
    if x.ndim > 2:
        shape_alone(x.shape).t()  # raises torch's error
    return in_order_of(x, range(x.ndim)[::-1])


@lowers(views.unsqueeze, Sparse, Permuted)
def unsqueeze(x: Sparse | Permuted, dim: int) -> Sparse | Permuted:
    dim = wrap_dim(dim, x.ndim + 1)
    if isinstance(x, Sparse) and (dim > x.pattern.ndim or (dim == x.pattern.ndim and x.dense_sizes)):
        return map_dense_dim(x, dim, lambda t, d: t.unsqueeze(d))
    if isinstance(x, Permuted) or keeps_dims_in_view(x.pattern):  # the last dimension of the base, shown at `dim`
        base, groups = shown(x)
        base = base.like(base.values.map(lambda t: t.unsqueeze(-1)))
        return shown_as(base, [*groups[:dim], (base.ndim - 1,), *groups[dim:]])
    flat, coordinates = unpadded_elements(x)
    zeros = torch.zeros_like(coordinates[0])
    sizes = x.pattern.sizes
    return with_coordinates(x, (*coordinates[:dim], zeros, *coordinates[dim:]), flat, (*sizes[:dim], 1, *sizes[dim:]))


def squeezed_dims(x: Sparse | Permuted, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions of size 1 among those that `squeeze` is given, from the last."""
    candidates = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return sorted({d for d in (wrap_dim(d, x.ndim) for d in candidates) if x.shape[d] == 1}, reverse=True)


@lowers(views.squeeze)
def squeeze(x: Sparse, dim: int | Sequence[int] | None = None) -> Sparse:
    removed = squeezed_dims(x, dim)
    sparse = x.pattern.ndim
    if not any(d < sparse for d in removed):
        dense = [d - sparse + x.pattern.lead for d in removed]
        return x.like(x.values.map(lambda t: t.squeeze(dense))) if dense else x
    flat, coordinates = unpadded_elements(x)
    inner = [d - sparse + 1 for d in removed if d >= sparse]
    flat = flat.map(lambda t: t.squeeze(inner)) if inner else flat
    kept = [d for d in range(sparse) if d not in removed]
    return with_coordinates(x, [coordinates[d] for d in kept], flat, [x.pattern.sizes[d] for d in kept])


def shape_of_view(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """`size` without a -1; torch's error where it does not fit the shape."""
    if -1 in size or math.prod(size) != math.prod(shape):
        return tuple(shape_alone(tuple(shape)).reshape(tuple(size)).shape)
    return tuple(size)


@lowers(views.view, Sparse, Permuted)
def view(x: Sparse | Permuted, size: Sequence[int]) -> Sparse | Permuted:
    """Where sparse dimensions cannot be kept, all are sparse."""
    shape = shape_of_view(x.shape, size)
    if isinstance(x, Permuted):
        return viewed(x, shape)
    sparse, dense, lead = x.pattern.ndim, len(x.dense_sizes), x.pattern.lead
    if shape[:sparse] == x.pattern.sizes and math.prod(shape[sparse:]) == math.prod(x.dense_sizes):
        return x.like(x.values.map(lambda t: t.reshape(*t.shape[:lead], *shape[sparse:])))
    if keeps_dims_in_view(x.pattern):
        with contextlib.suppress(NotLowered):
            return viewed(x, shape)
    if dense and shape[len(shape) - dense :] != x.dense_sizes:
        x, dense = with_sparse_dims(x, x.ndim), 0
    sizes = shape[: len(shape) - dense]
    if sizes and x.pattern.layout.row_major:  # a view does not change that order
        return Sparse(x.values, x.pattern.viewed(sizes, x.pattern.layout.with_room(len(sizes))))
    flat, coordinates = unpadded_elements(x)
    return with_coordinates(x, unravel(ravel(coordinates, x.pattern.sizes), sizes), flat, sizes)


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
    shape_alone(x.shape).narrow(dim, start, length)  # raises torch's error
    first = start % max(1, x.shape[dim])
    return slice(x, dim, first, first + length)


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
def diagonal(x: Sparse, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Sparse | Permuted:
    a, b = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    length = shape_alone(x.shape).diagonal(offset, dim1, dim2).shape[-1]
    if min(a, b) >= x.pattern.ndim:
        lead = x.pattern.lead - x.pattern.ndim
        return x.like(x.values.map(lambda t: t.diagonal(offset, a + lead, b + lead)))
    x = with_sparse_dims(x, max(a + 1, b + 1, x.pattern.ndim))
    flat, coordinates = unpadded_elements(x)
    index = (coordinates[b] - coordinates[a] == offset).nonzero()[:, 0]
    others = [d for d in range(x.pattern.ndim) if d not in (a, b)]
    moved = [*(coordinates[d][index] for d in others), torch.minimum(coordinates[a], coordinates[b])[index]]
    result = with_coordinates(x, moved, flat.take_rows(index), [*(x.shape[d] for d in others), length])
    return last_sparse_dim_last(result)


def last_sparse_dim_last(x: Sparse) -> Sparse | Permuted:
    """`x` with its last sparse dimension shown behind the dense ones."""
    last = x.pattern.ndim - 1
    return in_order_of(x, [*range(last), *range(last + 1, x.ndim), last])


# ---------------------------------------------------------------------------------------------- flips, rolls, repeats


@lowers(movement.flip)
def flip(x: Sparse, dims: Sequence[int]) -> Sparse:
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


@lowers(movement.rot90)
def rot90(x: Sparse, k: int = 1, dims: Sequence[int] = (0, 1)) -> Sparse | Permuted:
    """A rotation by 90° is a transposition and a flip."""
    k %= 4
    aten.rot90(shape_alone(x.shape), k, list(dims))  # raises torch's errors
    a, b = (d % x.ndim for d in dims)
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    if k == 0:
        return x.like(x.values.map(torch.clone))
    if k == 2:
        return flip(x, [a, b])
    if k == 1:
        return in_order_of(flip(x, [b]), order)
    transposed = in_order_of(x, order)
    if isinstance(transposed, Permuted):
        transposed = sparse_dims_first(transposed)
    return flip(transposed, [b])


@lowers(movement.roll)
def roll(x: Sparse, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Sparse:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [wrap_dim(d, x.ndim) for d in ([dims] if isinstance(dims, int) else dims)]
    if len(shifts) != max(len(dims), 1):
        shape_alone(x.shape).roll(shifts, dims)  # raises torch's error
    if not dims:
        x = with_sparse_dims(x, x.ndim)
        flat, coordinates = unpadded_elements(x)
        offsets = (ravel(coordinates, x.pattern.sizes) + shifts[0]) % max(math.prod(x.shape), 1)
        return with_coordinates(x, unravel(offsets, x.pattern.sizes), flat, x.pattern.sizes)
    inner = [(d - x.pattern.ndim + x.pattern.lead, n) for d, n in zip(dims, shifts, strict=True) if d >= x.pattern.ndim]
    if inner:
        values_dims, inner_shifts = zip(*inner, strict=True)
        x = x.like(x.values.map(lambda t: t.roll(inner_shifts, values_dims)))
    if len(inner) == len(dims):
        return x
    flat, coordinates = unpadded_elements(x)
    moved: list[Tensor] = list(coordinates)
    for shift, dim in zip(shifts, dims, strict=True):
        if dim < x.pattern.ndim:
            moved[dim] = (moved[dim] + shift) % max(x.shape[dim], 1)
    return with_coordinates(x, moved, flat, x.pattern.sizes)


@lowers(movement.repeat)
def repeat(x: Sparse, repeats: Sequence[int]) -> Sparse:
    new = len(repeats) - x.ndim
    if new < 0:
        shape_alone(x.shape).repeat(repeats)  # raises torch's error
    outer, inner = repeats[: new + x.pattern.ndim], repeats[new + x.pattern.ndim :]
    if any(times != 1 for times in inner):
        x = x.like(x.values.map(lambda t: t.repeat(*[1] * x.pattern.lead, *inner)))
    return repeat_sparse(x, outer, new)


@lowers(views.expand)
def expand(x: Sparse, size: Sequence[int], *, implicit: bool = False) -> Sparse:
    return expand_sparse(x, size)


# -------------------------------------------------------------------------------------------------------------- joins


def without_empty(tensors: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
    """The operands of `cat` without those of shape (0,), which torch.cat leaves out beside any others."""
    rest = [x for x in tensors if x.ndim != 1 or x.shape[0] != 0]
    return rest if 0 < len(rest) < len(tensors) and len({x.dtype for x in tensors}) == 1 else tensors


@joins.cat.lowering(Sparse)
@joins.cat.lowering(Permuted)
def cat_of_stored(op: OpOverload, tensors: Sequence[AnyRecord], dim: int = 0) -> Sparse | Permuted:
    kept = without_empty(tensors)
    kinds = {(type(x), x.ndim) for x in kept}
    if len(kinds) > 1:
        torch.cat([shape_alone(x.shape) for x in tensors], dim)  # raises torch's error where they do not fit
    if len(kinds) > 1 or isinstance(kept[0], Dense):
        raise NotLowered("operands whose elements would be moved are stored in different ways, or densely")
    return cat_of_permuted(kept, dim) if isinstance(kept[0], Permuted) else cat(kept, dim)  # type: ignore[arg-type]


def cat_of_permuted(tensors: Sequence[Permuted], dim: int) -> Sparse | Permuted:
    first = tensors[0]
    bases: list[Any] = [to_base_order(x, first) for x in tensors]
    result = cat(bases, first.base_dim(wrap_dim(dim, first.ndim)))
    if result.pattern.ndim > first.base.pattern.ndim and any(len(group) > 1 for group in first.groups):
        raise NotLowered("it joins along a dense dimension, and its operands do not share a sparsity pattern")
    return shown_as(result, first.groups)


def cat(tensors: Sequence[Sparse], dim: int) -> Sparse:
    first = tensors[0]
    if len(tensors) == 1:
        return first.like(first.values.map(torch.clone))
    dim = wrap_dim(dim, first.ndim)
    shapes = [x.shape for x in tensors]
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        torch.cat([shape_alone(shape) for shape in shapes], dim)  # raises torch's error
    sparse = max(x.pattern.ndim for x in tensors)
    if dim >= sparse and not all(x.pattern.same_as(first.pattern) for x in tensors):
        sparse = dim + 1
    tensors = [x if x.pattern.ndim == sparse else with_sparse_dims(x, sparse) for x in tensors]
    first = tensors[0]
    if dim >= sparse:
        return first.like(concat_values([x.values for x in tensors], dim - sparse + first.pattern.lead))
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


@lowers(joins.stack, Sparse, Permuted)
def stack(tensors: Sequence[Sparse | Permuted], dim: int = 0) -> Any:
    if len({tuple(x.shape) for x in tensors}) > 1:
        torch.stack([shape_alone(x.shape) for x in tensors], dim)  # raises torch's error
    dim = wrap_dim(dim, tensors[0].ndim + 1)
    return call(aten.cat.default, [unsqueeze(x, dim) for x in tensors], dim)


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


@lowers(views.view_as_complex, Sparse, Permuted)
def view_as_complex(x: Sparse | Permuted) -> Any:
    few = one_element_but_along(x.shape, -1)
    torch.view_as_complex(torch.empty(few, dtype=x.dtype, device="meta"))  # raises torch's errors
    real, imaginary = (call(aten.select.int, x, -1, n) for n in (0, 1))
    return call(aten.complex.default, real, imaginary)


@lowers(views.view_as_real, Permuted)
def view_as_real_in_order(x: Permuted) -> Permuted:
    return Permuted(view_as_real(x.base), (*x.order, x.base.ndim))


# -------------------------------------------------- views of records that show their base's dimensions in another order

# Composing orders, and merging and splitting dimensions, move no element (op_registry/sparse/permuted.py). A move along
# one dimension is the same move along that dimension of the base. A view lists the same elements in the same order. So
# its shape regroups the base's dimensions, in the order in which the record shows them: sparse dimensions stay whole,
# adjacent dense ones merge and split freely.


def regroup(
    groups: Groups, sizes: Sequence[int], sparse: int, shape: Sequence[int]
) -> tuple[Groups, tuple[int, ...]] | None:
    """The groups of a view in `shape`, and the sizes of the dense dimensions of its base; None if it has no elements,
    divides a sparse dimension, or mixes sparse with dense ones in several places.

    groups  those of the record that is viewed
    sizes   the shape of its base
    sparse  the number of sparse dimensions
    """
    if 0 in shape or 0 in sizes:
        return None
    # Sparse dimensions by number; dense ones are None, and adjacent ones of them are one.
    parts: list[tuple[int, int | None]] = []
    for d in [d for group in groups for d in group]:
        if d >= sparse and parts and parts[-1][1] is None:
            parts[-1] = parts[-1][0] * sizes[d], None
        else:
            parts.append((sizes[d], d if d < sparse else None))
    result: list[tuple[int, ...]] = []
    dense: list[int] = []
    for taken, dims in regrouped(parts, shape, lambda d: d is None):
        own = [(size, d) for size, d in taken if d is not None or size != 1] or [(1, None)]
        if dims > 1 or sum(d is None for _, d in own) > 1:
            return None
        dense += [size for size, d in own if d is None]
        result.append(tuple(sparse + len(dense) - 1 if d is None else d for _, d in own))
    has_all_sparse = sum(map(len, result)) == sparse + len(dense)
    return (tuple(result), tuple(dense)) if has_all_sparse else None


# ------------------------------------------------------------------------------------------------ order of dimensions


@lowers(views.squeeze, Permuted)
def squeeze_permuted(x: Permuted, dim: int | Sequence[int] | None = None) -> Sparse | Permuted:
    result: Any = x
    for d in squeezed_dims(x, dim):
        if isinstance(result, Permuted):
            squeezed = squeeze(result.base, result.base_dim(d))
            result = shown_without(squeezed, result, [d], keepdim=False)
        else:
            result = squeeze(result, d)
    return result


@lowers(views.expand, Permuted)
def expand_permuted(x: Any, size: Sequence[int], *, implicit: bool = False) -> Permuted:
    shape = tuple(shape_alone(x.shape).expand(list(size)).shape)
    for _ in range(len(shape) - x.ndim):
        x = unsqueeze(x, 0)
    base_shape = list(x.base.shape)
    for dim, (new, old) in enumerate(zip(shape, x.shape, strict=True)):
        if new != old:
            base_shape[x.base_dim(dim)] = new
    return x.like(expand(x.base, base_shape))


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
