"""The record of a sparsely stored masked tensor: what is stored, and where. What is not stored is invalid.

A rule that has no run of its own for this record is given dense records made of it (lowering.py): the values as they
lie, for operators that keep every element in its place, or *lines*, the stored elements of each slice side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.accumulate import accumulate, dtype_of_sum
from op_registry.records.broadcast import aligned_validity, full_mask
from op_registry.records.dense import Dense
from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import being_traced, gradients_may_flow
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.coalesce import merge_duplicates
from op_registry.sparse.convert import BITS, blocked, in_chunks, sorted_order
from op_registry.sparse.coordinates import Coordinates, ravel, unique_keys, unravel
from op_registry.sparse.layout import COO, Layout, grid_of
from op_registry.sparse.pattern import Pattern, pattern_of

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class NotLowered(Exception):
    """An operator has no way of its own for this call on sparse storage; the message says why."""


class Sparse:
    """Stored values and where they are.

    values   of shape (n, *dense), or (blocks, block rows, block columns, *dense); a stored value may itself be invalid
    pattern  which elements of the first dimensions they are
    """

    __slots__ = ("pattern", "values")

    def __init__(self, values: Dense, pattern: Pattern) -> None:
        self.values = values
        self.pattern = pattern

    def __repr__(self) -> str:
        return f"Sparse({self.pattern!r}, {self.values!r})"

    @property
    def dense_sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions behind the sparse ones."""
        return tuple(self.values.data.shape[self.pattern.lead :])

    @property
    def shape(self) -> torch.Size:
        pattern = self.pattern
        return torch.Size((*pattern.sizes, *self.values.data.shape[pattern.lead :]))

    @property
    def ndim(self) -> int:
        return len(self.pattern.sizes) + self.values.data.ndim - self.pattern.lead

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def like(self, values: Dense) -> Sparse:
        """Other values in the same places, which move to their device with them."""
        return Sparse(values, self.pattern.to(values.device))

    @property
    def flat(self) -> Dense:
        """The values one after another, (stored, *dense)."""
        if self.pattern.block is None:
            return self.values
        return self.values.map(lambda t: t.flatten(0, 2))

    def folded(self, flat: Dense) -> Sparse:
        """Other values, given one after another, in the same places."""
        return Sparse(flat.map(self.pattern.fold), self.pattern)

    def at(self, places: Coordinates) -> Dense:
        """The elements at `places`, (n, *dense): invalid where none is stored."""
        position, found = self.pattern.find(places)
        flat = self.flat_with_sentinel()
        return flat.take_rows(position).masked_by(as_int8(found).reshape(-1, *(1 for _ in range(flat.ndim - 1))))

    def flat_with_sentinel(self) -> Dense:
        """The values one after another, of which there is at least one.

        Where none may be stored, one more keeps the derivative in the graph; whether there are any, a graph cannot ask.
        """
        flat = self.flat
        if not being_traced(flat.data) and flat.shape[0] > 0:
            return flat
        return flat.map(lambda t: torch.cat([t, t.new_zeros((1, *t.shape[1:]))]))

    def count(self, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """Number of valid elements over `dims`, none negative: int64."""
        flat, places, sparse = self.flat, self.pattern.places(), self.pattern.ndim
        each = as_int8(full_mask(flat))
        inner = [d - sparse + 1 for d in dims if d >= sparse]
        number = each.sum(inner, dtype=torch.int64, keepdim=True) if inner else each.to(torch.int64)
        kept = [d for d in range(sparse) if d not in dims]
        sizes = [self.pattern.sizes[d] for d in kept]
        line = ravel([places[d] for d in kept], sizes) if kept else places[0].new_zeros(places[0].shape)
        total = number.new_zeros((math.prod(sizes), *number.shape[1:])).index_add(0, line, number)
        whole = [1 if d in dims else size for d, size in enumerate(self.shape)]
        return total.reshape(whole if keepdim else [size for d, size in enumerate(whole) if d not in dims])


def to_dense(x: Sparse) -> Dense:
    """The same tensor with every element stored; zeros lie where nothing was."""
    position, values = x.pattern.positions(), x.values
    signed = _writable_as(x.dtype)
    if signed is not None:
        whole = _spread(x.pattern, position, values.data.view(signed)).view(x.dtype)
    else:
        whole = _spread(x.pattern, position, values.data)
    if values.validity is not None:
        return Dense(whole, _spread(x.pattern, position, as_int8(full_mask(values))))
    # Where stored elements are valid throughout, one validity for each will do.
    there = values.data.new_ones((position.shape[0], *(x.pattern.block or ())), dtype=torch.int8)
    validity = _spread(x.pattern, position, there)
    return Dense(whole, validity.reshape(*x.pattern.sizes, *(1 for _ in x.dense_sizes)))


def _writable_as(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the same bits by which single elements are written, where torch cannot write those of `dtype`."""
    return torch.int8 if dtype.is_floating_point and dtype.itemsize == 1 else SIGNED.get(dtype)


def _spread(pattern: Pattern, position: Tensor, values: Tensor) -> Tensor:
    """Values as a pattern lists them, at their positions among zeros."""
    grid, inner = pattern.listed_sizes(), values.shape[1:]
    whole = values.new_zeros((math.prod(grid), *inner)).index_copy_(0, position, values).reshape(*grid, *inner)
    if pattern.block is None:
        return whole
    whole = whole.transpose(len(grid) - 1, len(grid))
    return whole.reshape(*pattern.sizes, *inner[2:])


def from_dense(
    x: Dense,
    layout: Layout,
    sparse_dim: int | None = None,
    block: tuple[int, int] | None = None,
) -> Sparse:
    """The valid elements of `x` in `layout`, the last `x.ndim - sparse_dim` dimensions left dense.

    Where there are dense dimensions, an element is stored if anything in it is valid. A block is stored if anything in
    it is valid.
    """
    dims = layout.default_dims(x.ndim) if sparse_dim is None else sparse_dim
    if not layout.exact and not layout.blocks:
        return to_layout(from_dense(x, layout.exact_sibling, dims), layout)
    validity = aligned_validity(x)
    if block is None and dims < x.ndim and (validity is None or math.prod(validity.shape[dims:]) == 1):
        return _whole_rows(x, validity, layout, dims)
    if block is not None:
        layout.check_block(x.shape[:dims], block)
    if in_chunks(x):
        pattern, data, inside = sparse_parts(x, layout, dims, block)
        return Sparse(Dense(data, inside), pattern)
    validity = x.full_validity
    whole = as_int8(torch.ones_like(x.data, dtype=torch.int8) if validity is None else validity)
    some = whole.flatten(dims).amax(-1) if dims < x.ndim and whole.numel() else whole
    if dims < x.ndim and not whole.numel():
        some = whole.new_zeros(x.shape[:dims])
    if block is not None:
        return _blocks_of_dense(x, whole, some, layout, block)
    places, pieces = layout.from_mask(some)
    inside = whole[places] if dims < x.ndim and validity is not None else None
    return Sparse(Dense(x.data[places], inside), Pattern(layout, some.shape, pieces))


def sparse_parts(
    x: Dense, layout: Layout, dims: int, block: tuple[int, int] | None
) -> tuple[Pattern, Tensor, Tensor | None]:
    """Pattern, values and their validity (None: all are valid) of what is stored of `x`, its first `dims` dimensions
    sparse. The values carry derivatives where they are asked for.
    """
    sizes = tuple(x.shape[:dims])
    validity = x.full_validity
    whole = x.data.new_ones((), dtype=torch.int8).expand(x.shape) if validity is None else as_int8(validity)
    some = whole
    if dims < x.ndim:
        some = whole.flatten(dims).amax(-1) if whole.numel() else whole.new_zeros(sizes)
    kept = None if validity is None or (dims == x.ndim and block is None) else whole
    moved = [] if gradients_may_flow(x.data) else [x.data.detach().view(BITS.get(x.dtype.itemsize, x.dtype))]
    carried = moved if kept is None else [*moved, kept]
    pieces, taken = layout.from_large_mask(some, carried, block)
    pattern = Pattern(layout, sizes, pieces, block)
    inside = None if kept is None else taken[-1]
    if moved:
        return pattern, taken[0].view(x.dtype), inside
    flat = ravel(pattern.listed(), pattern.listed_sizes())
    listed = x.data if block is None else blocked(x.data, len(sizes), block)
    lead = len(sizes)
    return pattern, listed.reshape(-1, *listed.shape[lead:]).index_select(0, flat), inside


def _whole_rows(x: Dense, validity: Tensor | None, layout: Layout, dims: int) -> Sparse:
    """Elements of which all dense dimensions are valid, or none: one look at each, and one copy."""
    sizes = tuple(x.shape[:dims])
    if validity is None:
        at = torch.arange(math.prod(sizes) if x.data.numel() else 0, device=x.device)
    else:
        rows = validity.reshape(validity.shape[:dims]).expand(sizes).reshape(-1)
        at = as_bool(rows).nonzero()[:, 0] if x.data.numel() else rows.new_zeros(0, dtype=torch.int64)
    places = unravel(at, sizes)
    if not layout.row_major:
        order = layout.order_of(places, sizes)
        at, places = at[order], tuple(p[order] for p in places)
    values = x.data.flatten(0, dims - 1) if dims > 1 else x.data
    return Sparse(Dense(values.index_select(0, at)), pattern_of(layout, places, sizes))


def _blocks_of_dense(x: Dense, whole: Tensor, some: Tensor, layout: Layout, block: tuple[int, int]) -> Sparse:
    sizes, dims = tuple(some.shape), some.ndim
    grid = grid_of(sizes, block)
    stored = blocked(some, dims, block).flatten(-2).amax(-1) if some.numel() else some.new_zeros(grid)
    places, pieces = layout.from_mask(stored)
    validity = None if x.validity is None else blocked(whole, dims, block)[places]
    return Sparse(Dense(blocked(x.data, dims, block)[places], validity), Pattern(layout, sizes, pieces, block))


def to_layout(x: Sparse, layout: Layout, block: tuple[int, int] | None = None) -> Sparse:
    """The same elements in another layout, never by way of the dense tensor."""
    given, sizes = x.pattern.layout, x.pattern.sizes
    if layout == given and block == x.pattern.block:
        return x
    if not layout.exact:
        return _with_others(x, layout, block or (x.pattern.block if layout.blocks else None))
    if layout.takes_pieces_of(given, x.pattern.ndim):
        return Sparse(x.values, Pattern(layout, sizes, x.pattern.pieces))
    flat, places = without_block_padding(x)
    if not given.exact:
        return from_coordinates(layout, places, flat, sizes)
    by, before = (each.index_order(range(x.pattern.ndim)) for each in (layout, given))
    if by == before:
        return Sparse(flat, pattern_of(layout, places, sizes))
    if by != (*before[:-2], *before[:-3:-1]):
        return from_coordinates(layout, places, flat, sizes)
    # Rows in order become columns in order, or the other way round, where elements are sorted by the new ones alone.
    lines = [sizes[d] for d in by[:-1]]
    order = sorted_order(ravel([places[d] for d in by[:-1]], lines), math.prod(lines))
    return Sparse(flat.take_rows(order), pattern_of(layout, tuple(p[order] for p in places), sizes))


def with_sparse_dims(x: Sparse, dims: int) -> Sparse:
    """The same elements, of which the first `dims` dimensions are sparse: COO, unless that is what they are already.

    Never by way of the dense tensor.
    """
    sizes, more = tuple(x.shape[:dims]), dims - x.pattern.ndim
    if more == 0:
        return x
    flat, places = without_block_padding(x)
    if more > 0:
        valid = as_bool(as_int8(full_mask(flat)))
        some = valid.flatten(1 + more).any(-1) if valid.ndim > 1 + more else valid
        at = some.nonzero(as_tuple=True)
        return from_coordinates(COO, (*(p[at[0]] for p in places), *at[1:]), flat.map(lambda t: t[at]), sizes)
    listed, which = unique_keys(ravel(places[:dims], sizes), math.prod(sizes))
    inside = (which, *places[dims:])
    shape = (listed.shape[0], *x.shape[dims:])
    validity = torch.zeros(shape, dtype=torch.int8, device=x.device).index_put(inside, as_int8(full_mask(flat)))
    values = Dense(flat.data.new_zeros(shape).index_put(inside, flat.data), validity)
    return Sparse(values, pattern_of(COO, unravel(listed, sizes), sizes))


def without_block_padding(x: Sparse) -> tuple[Dense, Coordinates]:
    """The values one after another and their places; without what a layout lists only because it has to.

    A graph keeps that as well: how much is left would be one more number that it does not know.
    """
    flat, places = x.flat, x.pattern.places()
    return (flat, places) if x.pattern.layout.exact else _some_valid(flat, places)


def _some_valid(values: Dense, places: Coordinates) -> tuple[Dense, Coordinates]:
    """Values of which something is valid, and their places; all of them in a graph."""
    if values.validity is None or being_traced(values.data):
        return values, places
    there = as_bool(as_int8(values.full_validity))  # type: ignore[arg-type]
    kept = (there.flatten(1).any(1) if there.ndim > 1 else there).nonzero()[:, 0]
    found = Dense(values.data[kept]) if values.ndim == 1 else values.take_rows(kept)
    return found, tuple(p[kept] for p in places)


def without_invalid(x: Sparse) -> Sparse:
    """The same record without what is listed and wholly invalid; as it is in a graph, or if that is listed anyway."""
    pattern = x.pattern
    if x.values.validity is None or being_traced(x.values.data) or not (pattern.layout.exact or pattern.layout.blocks):
        return x
    values, places = _some_valid(x.values, tuple(p.to(torch.int64) for p in pattern.listed()))
    if values.shape[0] == x.values.shape[0]:
        return Sparse(values, pattern)
    pieces = pattern.layout.pieces_of(places, pattern.listed_sizes(), pattern.pieces[0].dtype)
    return Sparse(values, Pattern(pattern.layout, pattern.sizes, pieces, pattern.block))


def from_coordinates(layout: Layout, places: Coordinates, flat: Dense, sizes: Sequence[int]) -> Sparse:
    """Elements at distinct places in any order, brought into the order of `layout`."""
    order = layout.order_of(places, sizes)
    return Sparse(flat.take_rows(order), pattern_of(layout, tuple(p[order] for p in places), sizes))


def _with_others(x: Sparse, layout: Layout, block: tuple[int, int] | None) -> Sparse:
    """The same elements in a layout that is not exact, those that it lists beside them invalid."""
    sizes = x.pattern.sizes
    if block is not None:
        layout.check_block(sizes, block)
    flat, places = without_block_padding(x)
    pieces, slots = layout.cover(places, sizes, block)
    pattern = Pattern(layout, sizes, pieces, block)
    shape = (pattern.stored, *x.dense_sizes)
    signed = _writable_as(x.dtype)
    written = flat.data if signed is None else flat.data.view(signed)
    data = written.new_zeros(shape).index_copy(0, slots, written)
    data = data if signed is None else data.view(x.dtype)
    validity = torch.zeros(shape, dtype=torch.int8, device=x.device).index_copy(0, slots, as_int8(full_mask(flat)))
    listed = (pieces[-1].shape[-1], *(block or ()))
    return Sparse(Dense(data, validity).map(lambda t: t.reshape(*listed, *x.dense_sizes)), pattern)


def coalesce(layout: Layout, places: Coordinates, flat: Dense, sizes: Sequence[int]) -> Sparse:
    """Elements at any places, those at the same place accumulated: summed where valid, valid where one of them is.

    Half precision is summed in float32 and rounded once; bool is "or". Sums run in the order in which elements come.
    """
    extents = layout.index_order(sizes)
    keys = ravel(layout.index_order(places), extents)
    if flat.validity is None and not being_traced(keys):
        listed, data = merge_duplicates(keys, flat.data)
        return Sparse(Dense(data), pattern_of(layout, layout.index_order(unravel(listed, extents)), sizes))
    listed, which = unique_keys(keys, math.prod(extents))
    shape = (listed.shape[0], *flat.shape[1:])
    wide = torch.int64 if flat.dtype is torch.bool else accumulation_dtype(flat.dtype)
    total = flat.data.new_zeros(shape, dtype=wide).index_add(0, which, flat.filled(0).to(wide))
    validity = flat.full_validity
    if validity is not None:
        found = torch.zeros(shape, dtype=torch.int32, device=flat.device).index_add(0, which, validity.to(torch.int32))
        validity = as_int8(found > 0)
    at = layout.index_order(unravel(listed, extents))
    return Sparse(Dense(total.to(flat.dtype), validity), pattern_of(layout, at, sizes))


def sum_of_union(records: Sequence[Sparse]) -> Sparse:
    """The sum of what is there, in the layout of the first record; see :func:`coalesced`."""
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
        raise NotLowered("how many blocks, or rows, there will be is not known while tracing")
    parts = [without_block_padding(with_sparse_dims(r, dims)) for r in records]
    places = tuple(torch.cat(p) for p in zip(*(p for _, p in parts), strict=True))
    flats = [Dense(flat.data.to(dtype), flat.validity) for flat, _ in parts]
    layout = first.pattern.layout
    total = coalesce(layout.exact_sibling, places, concat_values(flats), first.pattern.sizes)
    return to_layout(total, layout, first.pattern.block)


def concat_values(flats: Sequence[Dense], dim: int = 0) -> Dense:
    """Values one after another."""
    data = torch.cat([flat.data for flat in flats], dim)
    if all(flat.validity is None for flat in flats):
        return Dense(data)
    return Dense(data, torch.cat([as_int8(full_mask(flat)) for flat in flats], dim))
