"""Conversions of sparse records: to dense storage and back, to other layouts and other numbers of sparse dimensions.

Records are also made of elements at coordinates, read as such, and expanded to larger shapes. Nothing of the dense
tensor's size is allocated where the result is sparse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.records.arguments import accumulation_dtype, on_signed_bits, shape_alone
from op_registry.records.dense import Dense
from op_registry.records.layout import aligned_validity, full_mask
from op_registry.records.sums import accumulate, dtype_of_sum
from op_registry.records.tracing import being_traced, computed_at_once, gradients_may_flow
from op_registry.records.validity import as_bool, as_int8, kept_with, once_in_graph
from op_registry.sparse.compaction import BITS, in_chunks, sorted_order, to_block_grid
from op_registry.sparse.coordinates import (
    Coordinates,
    gather,
    merge_duplicates,
    ravel,
    sums_of_rows,
    unique_keys,
    unravel,
)
from op_registry.sparse.layout import COO, Layout
from op_registry.sparse.record import NotLowered, Pattern, Sparse, pattern_of

if TYPE_CHECKING:
    pass

# ------------------------------------------------------------------------------------------------------ dense storage


# Called with every record that is about to be stored densely, for whatever reason; traces watch it.
on_dense: list[Callable[[Sparse], None]] = []


def to_dense(x: Sparse) -> Dense:
    """The same tensor with every element stored; the data of absent elements is zero."""
    for watching in on_dense:
        watching(x)
    _check_that_memory_has_room(x)
    pattern, values = x.pattern, x.values
    position = once_in_graph(pattern.pieces[0], "listed positions", pattern.listed_positions, pattern)
    data = _as_bits(lambda bits: _scatter_listed(x.pattern, position, bits), values.data)
    if values.validity is not None:
        return Dense(data, _scatter_listed(x.pattern, position, as_int8(full_mask(values))), x.extent)

    def validity() -> Tensor:  # all stored values are valid: one per element is enough, broadcast over dense dimensions
        valid = values.data.new_ones((position.shape[0], *(pattern.block or ())), dtype=torch.int8)
        return _scatter_listed(pattern, position, valid)

    whole = once_in_graph(pattern.pieces[0], "dense validity", validity, pattern)
    return Dense(data, whole.reshape(*pattern.sizes, *(1 for _ in x.dense_sizes)), x.extent)


def _check_that_memory_has_room(x: Sparse) -> None:
    size = math.prod(x.shape) * x.dtype.itemsize
    if isinstance(size, int) and size >= 2**63:
        raise MaskedSemanticsError(
            f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype} would have {size:,} bytes in dense storage, more "
            "than int64 can number, and torch makes no such tensor. Work on what is stored (slices, reductions, "
            "x.values()), or convert a part of it: x[:1000]."
        )


def _as_bits(move: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`move(x)`, where `move` writes single elements: as integers, if torch's kernels do not support the dtype of `x`.

    Moves alone: sums of float8 would be wrong.
    """
    is_float8 = x.dtype.is_floating_point and x.dtype.itemsize == 1
    return move(x.view(torch.int8)).view(x.dtype) if is_float8 else on_signed_bits(move, x)


def placed(flat: Dense, slots: Tensor, size: int) -> Dense:
    """Elements (n, *dense) at distinct `slots` among `size`; zeros elsewhere, which are invalid."""

    def place(t: Tensor) -> Tensor:
        return t.new_zeros((size, *t.shape[1:])).index_copy(0, slots, t)

    return Dense(_as_bits(place, flat.data), place(as_int8(full_mask(flat))))


def _scatter_listed(pattern: Pattern, position: Tensor, values: Tensor) -> Tensor:
    """A dense tensor with the pattern's values at their positions, and zeros elsewhere."""
    grid, inner = pattern.listed_sizes(), values.shape[1:]
    dense = values.new_zeros((math.prod(grid), *inner)).index_copy_(0, position, values).reshape(*grid, *inner)
    if pattern.block is None:
        return dense
    dense = dense.transpose(len(grid) - 1, len(grid))
    return dense.reshape(*pattern.sizes, *inner[2:])


def from_dense(
    x: Dense,
    layout: Layout,
    sparse_dim: int | None = None,
    block: tuple[int, int] | None = None,
) -> Sparse:
    """The valid elements of `x` in `layout`, its last `x.ndim - sparse_dim` dimensions dense.

    With dense dimensions, an element is stored if any of its values is valid; a block if any of its elements is.
    """
    dims = layout.default_dims(x.ndim) if sparse_dim is None else sparse_dim
    if not layout.exact and not layout.blocks:
        return to_layout(from_dense(x, layout.exact_sibling, dims), layout)
    validity = aligned_validity(x)
    if block is None and dims < x.ndim and (validity is None or math.prod(validity.shape[dims:]) == 1):
        return _from_whole_elements(x, validity, layout, dims)
    if block is not None:
        layout.check_block(x.shape[:dims], block)
    if in_chunks(x):
        pattern, data, inner_validity = sparse_parts(x, layout, dims, block)
        return Sparse(Dense(data, inner_validity), pattern)
    listed = x if block is None else x.map(lambda t: to_block_grid(t, dims, block))
    validity = listed.full_validity
    valid = as_int8(torch.ones_like(listed.data, dtype=torch.int8) if validity is None else validity)
    coordinates, pieces = layout.from_mask(_any_of_element(valid, dims))
    inner_validity = valid[coordinates] if dims < listed.ndim and validity is not None else None
    return Sparse(Dense(listed.data[coordinates], inner_validity), Pattern(layout, x.shape[:dims], pieces, block))


def _any_of_element(valid: Tensor, dims: int) -> Tensor:
    """An int8 mask of elements, or blocks, with a valid value: the maximum over the dimensions from `dims`."""
    if dims == valid.ndim:
        return valid
    return valid.flatten(dims).amax(-1) if valid.numel() else valid.new_zeros(valid.shape[:dims])


def sparse_parts(
    x: Dense, layout: Layout, dims: int, block: tuple[int, int] | None
) -> tuple[Pattern, Tensor, Tensor | None]:
    """Converts large `x`, its first `dims` dimensions sparse: pattern, values and their validity (None: all valid).

    The values are differentiable if gradients may flow.
    """
    sizes = tuple(x.shape[:dims])
    validity = x.full_validity
    valid = x.data.new_ones((), dtype=torch.int8).expand(x.shape) if validity is None else as_int8(validity)
    any_valid = _any_of_element(valid, dims)
    stores_validity = validity is not None and (dims < x.ndim or block is not None)
    data = [] if gradients_may_flow(x.data) else [x.data.detach().view(BITS.get(x.dtype.itemsize, x.dtype))]
    carried = [*data, valid] if stores_validity else data
    pieces, stored = layout.from_large_mask(any_valid, carried, block)
    pattern = Pattern(layout, sizes, pieces, block)
    inner_validity = stored[-1] if stores_validity else None
    if data:
        return pattern, stored[0].view(x.dtype), inner_validity
    positions = ravel(pattern.listed_coordinates(), pattern.listed_sizes())
    grid = x.data if block is None else to_block_grid(x.data, len(sizes), block)
    values = grid.reshape(-1, *grid.shape[len(sizes) :]).index_select(0, positions)
    return pattern, values, inner_validity


def _from_whole_elements(x: Dense, validity: Tensor | None, layout: Layout, dims: int) -> Sparse:
    """`from_dense` if all values of an element have the same validity: one check per element, and one copy."""
    sizes = tuple(x.shape[:dims])
    lengths = _known_lengths(x) if dims == 2 else None
    if validity is None:
        positions = torch.arange(math.prod(sizes) if x.data.numel() else 0, device=x.device)
    elif lengths is not None:
        valid = validity.reshape(validity.shape[:dims]).expand(sizes).reshape(-1)
        positions = as_bool(valid).nonzero_static(size=sum(lengths))[:, 0]
    else:
        valid = validity.reshape(validity.shape[:dims]).expand(sizes).reshape(-1)
        positions = as_bool(valid).nonzero()[:, 0] if x.data.numel() else valid.new_zeros(0, dtype=torch.int64)
    coordinates = unravel(positions, sizes)
    if not layout.row_major:
        order = layout.order_of(coordinates, sizes)
        positions, coordinates = positions[order], tuple(c[order] for c in coordinates)
    values = x.data.flatten(0, dims - 1) if dims > 1 else x.data
    moved = on_signed_bits(lambda bits: bits.index_select(0, positions), values)
    pattern = pattern_of(layout, coordinates, sizes)
    if lengths is not None and layout.of_sequences:
        pattern.cached("lengths", lambda: lengths)
    return Sparse(Dense(moved), pattern)


def remember_lengths(validity: Tensor, lengths: Sequence[int]) -> None:
    """How many elements each row of a mask (B, T, 1, ...) on a device has, which the host knows: storing them sparsely
    then waits for nothing.
    """
    if not validity.is_inference():
        kept_with(validity)[_LENGTHS] = list(lengths)


_LENGTHS = ("lengths",)


def _known_lengths(x: Dense) -> list[int] | None:
    """What `remember_lengths` keeps of the mask of a record; None if nothing, or on a mask of other rows."""
    mask = x.validity
    if mask is None or not computed_at_once(mask) or mask.is_inference() or mask.shape[:2] != x.shape[:2]:
        return None
    return kept_with(mask).get(_LENGTHS) if mask.ndim == x.ndim and x.data.numel() else None


# ---------------------------------------------------------------------------------------- other layouts and dimensions


def to_layout(x: Sparse, layout: Layout, block: tuple[int, int] | None = None) -> Sparse:
    """The same elements in another layout; nothing of the dense tensor's size is allocated."""
    source, sizes = x.pattern.layout, x.pattern.sizes
    if layout == source and block == x.pattern.block:
        return x
    if layout.exact and layout.takes_pieces_of(source, x.pattern.ndim):
        return Sparse(x.values, Pattern(layout, sizes, x.pattern.pieces))
    flat, coordinates = unpadded_elements(x)
    if layout.exact and source.exact:
        new_order, old_order = (side.index_order(range(x.pattern.ndim)) for side in (layout, source))
        if new_order == old_order:
            return Sparse(flat, pattern_of(layout, coordinates, sizes))
        if new_order == (*old_order[:-2], *old_order[:-3:-1]):
            # From row-major to column-major or back: a stable sort by all but the last index is enough.
            extents = [sizes[d] for d in new_order[:-1]]
            order = sorted_order(ravel([coordinates[d] for d in new_order[:-1]], extents), math.prod(extents))
            return Sparse(flat.take_rows(order), pattern_of(layout, tuple(c[order] for c in coordinates), sizes))
    return from_coordinates(layout, coordinates, flat, sizes, block or (x.pattern.block if layout.blocks else None))


def with_sparse_dims(x: Sparse, dims: int) -> Sparse:
    """The same elements with the first `dims` dimensions sparse: in COO, or `x` itself if it has as many.

    Nothing of the dense tensor's size is allocated. NotLowered for more sparse dimensions while tracing.
    """
    sizes, additional = tuple(x.shape[:dims]), dims - x.pattern.ndim
    if additional == 0:
        return x
    if additional > 0 and being_traced(x.values.data):
        raise NotLowered("the number of valid elements in dense dimensions is not known while tracing")
    flat, coordinates = unpadded_elements(x)
    if additional > 0:
        valid = as_bool(as_int8(full_mask(flat)))
        any_valid = valid.flatten(1 + additional).any(-1) if valid.ndim > 1 + additional else valid
        index = any_valid.nonzero(as_tuple=True)
        all_coordinates = (*(c[index[0]] for c in coordinates), *index[1:])
        values = flat.map(lambda t: t[index])
        return from_coordinates(COO, all_coordinates, Dense(values.data) if dims == x.ndim else values, sizes)
    unique, inverse = unique_keys(ravel(coordinates[:dims], sizes), math.prod(sizes))
    index = (inverse, *coordinates[dims:])
    shape = (unique.shape[0], *x.shape[dims:])
    validity = torch.zeros(shape, dtype=torch.int8, device=x.device).index_put(index, as_int8(full_mask(flat)))
    data = on_signed_bits(lambda bits: bits.new_zeros(shape).index_put(index, bits), flat.data)
    return Sparse(Dense(data, validity), pattern_of(COO, unravel(unique, sizes), sizes))


def unpadded_elements(x: Sparse) -> tuple[Dense, Coordinates]:
    """The values in storage order, (n, *dense), and their coordinates, without the padding of an inexact layout.

    Elements without any valid value are dropped there: block layouts, for one, store them to complete their blocks. A
    traced graph keeps them, since it would have to guard on their number.
    """
    flat, coordinates = x.flat, x.pattern.coordinates()
    return (flat, coordinates) if x.pattern.layout.exact else drop_invalid(flat, coordinates)


def drop_invalid(values: Dense, coordinates: Sequence[Tensor]) -> tuple[Dense, Coordinates]:
    """The elements with a valid value, and their coordinates; all elements while tracing."""
    if values.validity is None or being_traced(values.data):
        return values, tuple(coordinates)
    valid = as_bool(as_int8(values.full_validity))  # type: ignore[arg-type]
    index = (valid.flatten(1).any(1) if valid.ndim > 1 else valid).nonzero()[:, 0]
    remaining = Dense(gather(values.data, (index,))) if values.ndim == 1 else values.take_rows(index)
    return remaining, tuple(c[index] for c in coordinates)


def without_invalid(x: Sparse) -> Sparse:
    """The same record without elements or blocks that are fully invalid.

    Unchanged while tracing, and in inexact layouts without blocks, which would store them again.
    """
    pattern = x.pattern
    if x.values.validity is None or being_traced(x.values.data) or not (pattern.layout.exact or pattern.layout.blocks):
        return x
    values, coordinates = drop_invalid(x.values, tuple(c.to(torch.int64) for c in pattern.listed_coordinates()))
    if values.shape[0] == x.values.shape[0]:
        return Sparse(values, pattern)
    pieces = pattern.layout.pieces_of(coordinates, pattern.listed_sizes(), pattern.pieces[0].dtype)
    return Sparse(values, Pattern(pattern.layout, pattern.sizes, pieces, pattern.block))


# ------------------------------------------------------------------------------------------ records from coordinates


def from_coordinates(
    layout: Layout, coordinates: Coordinates, flat: Dense, sizes: Sequence[int], block: tuple[int, int] | None = None
) -> Sparse:
    """A record of elements at distinct coordinates in any order; an inexact layout is padded with invalid ones."""
    if layout.exact:
        order = layout.order_of(coordinates, sizes)
        return Sparse(flat.take_rows(order), pattern_of(layout, tuple(c[order] for c in coordinates), sizes))
    if block is not None:
        layout.check_block(sizes, block)
    pieces, slots = layout.cover(coordinates, sizes, block)
    pattern = Pattern(layout, sizes, pieces, block)
    return Sparse(placed(flat, slots, pattern.stored).map(pattern.fold), pattern)


def coalesce(layout: Layout, coordinates: Coordinates, flat: Dense, sizes: Sequence[int]) -> Sparse:
    """A record of elements in which those at equal coordinates are accumulated: the sum of the valid ones, valid if one
    of them is.

    Half precision is summed in float32 and rounded once; bool is combined by logical or. The order of summation is that
    of the elements.
    """
    extents = layout.index_order(sizes)
    keys = ravel(layout.index_order(coordinates), extents)
    if flat.validity is None and not being_traced(keys):
        unique, data = merge_duplicates(keys, flat.data)
        return Sparse(Dense(data), pattern_of(layout, layout.index_order(unravel(unique, extents)), sizes))
    unique, inverse = unique_keys(keys, math.prod(extents))
    shape = (unique.shape[0], *flat.shape[1:])
    total = sums_of_rows(shape[0], inverse, flat.filled(0))
    validity = flat.full_validity
    if validity is not None:
        zeros = torch.zeros(shape, dtype=torch.int32, device=flat.device)
        validity = as_int8(zeros.index_add(0, inverse, validity.to(torch.int32)) > 0)
    merged = layout.index_order(unravel(unique, extents))
    return Sparse(Dense(total, validity), pattern_of(layout, merged, sizes))


def sum_of_union(records: Sequence[Sparse]) -> Sparse:
    """The sum of valid contributions, in the layout of the first record; see :func:`coalesce`."""
    first = records[0]
    dtype = dtype_of_sum([record.values.data for record in records])
    if any(record.shape != first.shape for record in records):
        raise NotLowered(f"records of shapes {[tuple(r.shape) for r in records]} are broadcast")
    if all(record.pattern.same_as(first.pattern) for record in records):
        return first.like(accumulate([record.values for record in records]))
    dims = first.pattern.ndim
    if being_traced(first.values.data) and (
        not first.pattern.layout.exact or any(r.pattern.ndim != dims for r in records)
    ):
        raise NotLowered("the number of blocks or rows of the sum is not known while tracing")
    parts = [unpadded_elements(with_sparse_dims(r, dims)) for r in records]
    coordinates = tuple(torch.cat(indices) for indices in zip(*(c for _, c in parts), strict=True))
    flats = [Dense(flat.data.to(dtype), flat.validity) for flat, _ in parts]
    layout = first.pattern.layout
    total = coalesce(layout.exact_sibling, coordinates, concat_values(flats), first.pattern.sizes)
    return to_layout(total, layout, first.pattern.block)


def concat_values(flats: Sequence[Dense], dim: int = 0) -> Dense:
    """The concatenation of values along `dim`."""
    data = torch.cat([flat.data for flat in flats], dim)
    if all(flat.validity is None for flat in flats):
        return Dense(data)
    return Dense(data, torch.cat([as_int8(full_mask(flat)) for flat in flats], dim))


# ------------------------------------------------------------------------------------------------------ single elements


def lookup(x: Dense | Sparse, coordinates: Sequence[Tensor]) -> Dense:
    """The elements at coordinates in every dimension of a shape that `x` broadcasts to: (n,), invalid where none is
    stored.
    """
    if isinstance(x, Dense) and x.ndim == 0:
        shape = coordinates[0].shape if coordinates else (1,)
        return x.map(lambda t: t.expand(shape))
    return elements_at(x, tuple(coordinates[-x.ndim :]), repeated=False)


def elements_at(record: Dense | Sparse, coordinates: Coordinates, repeated: bool = True) -> Dense:
    """The elements at coordinates in the first dimensions, (n, …): in dimensions of size 1, which broadcast, at 0.

    repeated  whether many of them are the same, so that backward sums gradients: never in half precision
    """
    sizes = zip(coordinates, record.shape, strict=False)
    index = tuple(torch.zeros_like(c) if known_to_hold(size == 1) else c for c, size in sizes)
    if isinstance(record, Sparse):
        return record.at(index)
    validity, data = record.full_validity, record.data
    gather_dtype = accumulation_dtype(data.dtype) if repeated and gradients_may_flow(data) else data.dtype
    gathered = gather(data.to(gather_dtype), index).to(data.dtype)
    return Dense(gathered, None if validity is None else gather(validity, index))


def valid_elements(x: Sparse) -> tuple[Dense, Coordinates]:
    """The valid elements, (n,), and their coordinates in every dimension. Invalid ones remain in a traced graph."""
    flat, coordinates = unpadded_elements(x)
    if not x.dense_sizes:
        return drop_invalid(flat, coordinates)
    if being_traced(flat.data):
        raise NotLowered("the number of valid elements in dense dimensions is not known while tracing")
    row, *inner = as_bool(as_int8(full_mask(flat))).nonzero(as_tuple=True)
    return Dense(flat.data[(row, *inner)]), (*(c[row] for c in coordinates), *inner)


def valid_elements_of(x: Dense | Sparse) -> tuple[Dense, Coordinates]:
    """`valid_elements` of a record in any layout; a 0-d tensor is returned as one element even if it is invalid."""
    if isinstance(x, Dense) and x.ndim == 0:
        return x.map(lambda t: t.reshape(1)), ()
    return valid_elements(x if isinstance(x, Sparse) else from_dense(x, COO))


def from_elements(
    x: Sparse, flat: Dense, coordinates: Sequence[Tensor], sizes: Sequence[int], *, summed: bool = False
) -> Sparse:
    """A record of elements at coordinates in every dimension, with as many dense dimensions as `x` and its layout
    if that allows the number of sparse ones.

    `summed` allows duplicate coordinates, whose valid elements are summed.
    """
    sparse = len(sizes) - len(x.dense_sizes)
    if sparse <= 0:
        raise NotLowered("no sparse dimension is left")
    layout = layout_with_room(x, sparse)
    build = coalesce if summed else from_coordinates
    if not x.dense_sizes:
        return build(layout, tuple(coordinates), flat, sizes)
    # First one element each, then rows: memory for the rows of the result alone.
    elements = build(COO, tuple(coordinates), flat, sizes)
    return to_layout(with_sparse_dims(elements, sparse), layout)


def layout_with_room(x: Sparse, sparse: int) -> Layout:
    """The layout of `x` (its exact sibling) if it allows so many sparse dimensions, else COO."""
    return x.pattern.layout.with_room(sparse)


def grid_coordinates(shape: Sequence[int], device: torch.device) -> Coordinates:
    """The coordinates of every element of a dense tensor."""
    return unravel(torch.arange(math.prod(shape), device=device), shape)


def sorted_coordinates(chosen: Tensor, coordinates: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The coordinates of the elements for which `chosen` is True, in row-major order."""
    index = chosen.nonzero()[:, 0]
    selected = [c[index] for c in coordinates]
    order = ravel(selected, shape).argsort()
    return tuple(c[order] for c in selected)


# --------------------------------------------------------------------------------------------------------- broadcasting
# Stored elements are repeated, absent ones are never visited.


def with_coordinates(x: Sparse, coordinates: Sequence[Tensor], flat: Dense, sizes: Sequence[int]) -> Sparse:
    """Elements at new coordinates, in the layout of `x` if it allows that many dimensions, else in COO."""
    if not sizes:
        raise NotLowered("no sparse dimension is left")
    return from_coordinates(x.pattern.layout.with_room(len(sizes)), tuple(coordinates), flat, sizes)


def expand_sparse(x: Sparse, size: Sequence[int]) -> Sparse:
    """Like ``x.expand(size)``; NotLowered if the result is empty."""
    shape = shape_alone(x.shape).expand(list(size)).shape
    dense, new = len(x.dense_sizes), len(shape) - x.ndim
    inner = tuple(shape[len(shape) - dense :]) if dense else ()
    if inner != x.dense_sizes:
        x = x.like(x.values.map(lambda t: t.expand(*t.shape[: x.pattern.lead], *inner)))
    if tuple(shape) == tuple(x.shape):
        return x
    if 0 in shape:
        raise NotLowered("the expanded tensor is empty")
    old_sizes = (1,) * new + x.pattern.sizes
    times = [1 if n == m else n for n, m in zip(shape[: len(old_sizes)], old_sizes, strict=True)]
    return repeat_sparse(x, times, new)


def repeat_sparse(x: Sparse, times: Sequence[int], new: int) -> Sparse:
    """Repeat each sparse dimension as often as `times` says, after adding `new` dimensions of size 1 in front."""
    flat, coordinates = unpadded_elements(x)
    stored, total = coordinates[0].shape[0], math.prod(times)  # no int(): it would specialize a graph on the number
    copies = torch.arange(total, device=x.device).unsqueeze(1).expand(total, stored).reshape(-1)
    source = torch.arange(stored, device=x.device).expand(total, stored).reshape(-1)
    sizes = (1,) * new + x.pattern.sizes
    zeros = torch.zeros_like(source)
    original = [zeros] * new + [c[source] for c in coordinates]
    copy_index = unravel(copies, times)
    moved = [c + i * n for c, i, n in zip(original, copy_index, sizes, strict=True)]
    return with_coordinates(x, moved, flat.take_rows(source), [n * m for n, m in zip(sizes, times, strict=True)])
