"""Sparse records: the values that a sparsely stored masked tensor stores, and the pattern of what is stored.

A pattern covers a tensor's first dimensions, the sparse ones, in some layout (layout.py). Each stored value may have
further dense dimensions (torch calls such tensors hybrid). Values are kept outside the pattern, in its order: ``(n,
*dense)``, or ``(blocks, block rows, block columns, *dense)`` in block layouts. What is not stored is invalid.

Each element is listed at most once, in the layout's order. The layout interprets the index tensors; a pattern derives
what is common to all layouts, and caches it. A rule without a lowering of its own can run on dense records made from a
sparse one: the values in storage order (on_values.py, slicewise.py), or *padded rows* (segments.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.errors import MaskedSemanticsError
from op_registry.records.arguments import Dims, wrap_dims
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent
from op_registry.records.layout import full_mask
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8, once_in_graph
from op_registry.sparse.coordinates import (
    Coordinates,
    ravel,
    unravel,
)
from op_registry.sparse.layout import Layout, grid_of


class Pattern:
    """Which elements of a tensor are stored.

    layout  how elements are listed
    sizes   sizes of the sparse dimensions
    pieces  the layout's index tensors, int64 or int32
    block   (rows, columns) of a block, in block layouts
    """

    __slots__ = ("_cache", "_kept_in_graph", "block", "layout", "lead", "pieces", "sizes")

    def __init__(
        self,
        layout: Layout,
        sizes: Sequence[int],
        pieces: tuple[Tensor, ...],
        block: tuple[int, int] | None = None,
    ) -> None:
        self.layout = layout
        self.sizes = tuple(sizes)
        self.pieces = pieces
        self.block = block
        # The number of leading dimensions of the values, before the dense ones.
        self.lead = 3 if block else 1
        self._cache: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        block = f", block={self.block}" if self.block else ""
        return f"Pattern({self.layout}, sizes={self.sizes}, stored={self.stored}{block})"

    @property
    def ndim(self) -> int:
        """Number of sparse dimensions."""
        return len(self.sizes)

    @property
    def stored(self) -> int:
        """Number of stored elements (nnz)."""
        return self.pieces[-1].shape[-1] * math.prod(self.block or ())

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def to(self, device: torch.device) -> Pattern:
        """The same pattern on a device; itself, if it is there already."""
        if self.device == device:
            return self
        if self.device.type == "meta":
            raise MaskedSemanticsError(
                f"a tensor of sizes {tuple(self.sizes)}, stored sparsely ({self.layout.public}), is on meta, where it "
                f"is unknown which elements are stored, so that it cannot be made on {device}. Make it dense first: "
                "x.to_dense()."
            )
        return self.with_pieces(tuple(piece.to(device) for piece in self.pieces))

    def with_pieces(self, pieces: tuple[Tensor, ...]) -> Pattern:
        """The same pattern with other index tensors of equal contents; the cache is not copied."""
        return Pattern(self.layout, self.sizes, pieces, self.block)

    def same_as(self, other: Pattern) -> bool:
        """Whether both consist of the same index tensor objects, so that they are known to list the same elements."""
        if self is other:
            return True
        alike = (self.layout, self.sizes, self.block) == (other.layout, other.sizes, other.block)
        return alike and all(a is b for a, b in zip(self.pieces, other.pieces, strict=True))

    # ------------------------------------------------------------------------------------------------ stored elements

    def lengths(self) -> list[int]:
        """The number of stored elements of each row, for layouts that list single elements row by row."""

        def lengths() -> list[int]:
            ends = self.ends()
            assert ends is not None
            return ends.diff().tolist()

        return self.cached("lengths", lengths)

    def ends(self) -> Tensor | None:
        """Where each row (or column) starts and ends among the stored elements, (rows + 1,); None if they are not
        stored row by row.
        """
        return None if self.block is not None else self.layout.ends(self.pieces, self.sizes)

    def coordinates(self) -> Coordinates:
        """The index of every stored element in each sparse dimension, int64 of shape (stored,)."""
        return self.cached("coordinates", self._element_coordinates)

    def positions(self) -> Tensor:
        """The position of every stored element in the flattened sparse dimensions, int64 of shape (stored,)."""
        return self.cached("positions", self._element_positions)

    def raveled(self, dims: Sequence[int]) -> Tensor:
        """The position of every stored element in some sparse dimensions, flattened; 0 if there are none."""
        coordinates = self.coordinates()
        if not dims:
            return torch.zeros_like(coordinates[0])
        return ravel([coordinates[d] for d in dims], [self.sizes[d] for d in dims])

    def viewed(self, sizes: Sequence[int], layout: Layout) -> Pattern:
        """The pattern of a view with other sizes; the same object each time, so that `same_as` recognises it."""
        shape = tuple(sizes)
        return self.cached(("viewed", shape), lambda: pattern_of(layout, unravel(self.positions(), shape), shape))

    def find(self, coordinates: Coordinates) -> tuple[Tensor, Tensor]:
        """For n elements the slot of each among the stored ones (int64), and whether it is stored (bool)."""
        if self.block is None:
            offset_in_block, listed, sizes = None, coordinates, self.sizes
        else:
            rows, columns = self.block
            offset_in_block = coordinates[-2] % rows * columns + coordinates[-1] % columns
            listed = (*coordinates[:-2], coordinates[-2] // rows, coordinates[-1] // columns)
            sizes = self.listed_sizes()
        wanted, keys = ravel(self.layout.index_order(listed), self.layout.index_order(sizes)), self._keys()
        slot = torch.searchsorted(keys, wanted)
        stored = keys[slot] == wanted
        if offset_in_block is not None:
            slot = slot * math.prod(self.block or ()) + offset_in_block
        return torch.where(stored, slot, 0), stored

    def fold(self, flat: Tensor) -> Tensor:
        """Values in storage order, (stored, *dense), split into blocks in block layouts."""
        if self.block is None:
            return flat
        return flat.unflatten(0, (-1, *self.block))

    # --------------------------------------------------------------------------------- listed entries: blocks, if any

    def listed_coordinates(self) -> Coordinates:
        """The coordinates of each listed element, or of each block in units of blocks: int64 or the pieces' dtype."""
        return self.layout.coordinates(self.pieces, self.listed_sizes())

    def listed_sizes(self) -> tuple[int, ...]:
        """Sizes of the sparse dimensions, in units of blocks in block layouts."""
        return self.sizes if self.block is None else grid_of(self.sizes, self.block)

    def listed_positions(self) -> Tensor:
        """The position of each listed element or block in the flattened dense tensor, or grid of blocks: int64."""
        return self.layout.positions(self.pieces, self.listed_sizes())

    def _keys(self) -> Tensor:
        """An ascending key for each listed element or block, followed by a sentinel greater than all of them.

        The sentinel makes the result non-empty, which a traced graph could not check.
        """

        def keys() -> Tensor:
            order = self.layout.index_order
            keys = ravel(order(self.listed_coordinates()), order(self.listed_sizes()))
            return torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])

        return self.cached("keys", keys)

    def _element_coordinates(self) -> Coordinates:
        listed = tuple(c.to(torch.int64) for c in self.listed_coordinates())
        if self.block is None:
            return listed
        rows, columns = self.block
        shape = (listed[0].shape[0], rows, columns)
        row_in_block = torch.arange(rows, device=self.device).view(1, -1, 1)
        column_in_block = torch.arange(columns, device=self.device).view(1, 1, -1)
        per_element = [c.view(-1, 1, 1) for c in listed]
        per_element[-2] = per_element[-2] * rows + row_in_block
        per_element[-1] = per_element[-1] * columns + column_in_block
        return tuple(c.expand(shape).reshape(-1) for c in per_element)

    def _element_positions(self) -> Tensor:
        return self.listed_positions() if self.block is None else ravel(self.coordinates(), self.sizes)

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """A value derived from the pattern.

        Not cached in inference mode, whose tensors cannot be saved for backward; while tracing, for the graph alone.
        """
        if being_traced(self.pieces[0]):
            return once_in_graph(self.pieces[0], key, compute, self)
        if torch.is_inference_mode_enabled():
            return compute()
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]


def pattern_of(
    layout: Layout, coordinates: Coordinates, sizes: Sequence[int], index_dtype: torch.dtype = torch.int64
) -> Pattern:
    """The pattern of elements at distinct coordinates, given in the order of an exact layout."""
    return Pattern(layout, sizes, layout.pieces_of(coordinates, sizes, index_dtype))


# -------------------------------------------------------------------------------------------------------------- records


class NotLowered(Exception):
    """An operator cannot run this call on sparse storage; the message says why."""


class Sparse:
    """Stored values and their pattern.

    values   of shape (n, *dense), or (blocks, block rows, block columns, *dense); a stored value may itself be invalid
    pattern  which elements of the first dimensions they are
    extent   which positions of a padded batch are there (op_registry.extents); lowerings need not return it
    """

    __slots__ = ("extent", "pattern", "values")

    def __init__(self, values: Dense, pattern: Pattern, extent: Extent | None = None) -> None:
        self.values = values
        self.pattern = pattern
        self.extent = extent

    def __repr__(self) -> str:
        return f"Sparse({self.pattern!r}, {self.values!r})"

    @property
    def dense_sizes(self) -> tuple[int, ...]:
        """Sizes of the dense dimensions, which follow the sparse ones."""
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
        """Other values with the same pattern, which is moved to their device."""
        return Sparse(values, self.pattern.to(values.device))

    @property
    def flat(self) -> Dense:
        """The values in storage order, (stored, *dense)."""
        if self.pattern.block is None:
            return self.values
        return self.values.map(lambda t: t.flatten(0, 2))

    def folded(self, flat: Dense) -> Sparse:
        """Other values in storage order, (stored, *dense), with the same pattern."""
        return Sparse(flat.map(self.pattern.fold), self.pattern)

    def at(self, coordinates: Coordinates) -> Dense:
        """The elements at `coordinates` in all sparse dimensions or more, (n, …): invalid where none is stored."""
        sparse = self.pattern.ndim
        slot, stored = self.pattern.find(coordinates[:sparse])
        values = self.flat_with_sentinel().map(lambda t: t[(slot, *coordinates[sparse:])])
        return values.masked_by(as_int8(stored).reshape(-1, *[1] * (values.ndim - 1)))

    def flat_with_sentinel(self) -> Dense:
        """`flat`, with an additional element if it may be empty.

        So there is always an element to index, which keeps the result in the autograd graph. A traced graph cannot ask
        whether anything is stored, and always gets the additional element.
        """
        flat = self.flat
        if not being_traced(flat.data) and flat.shape[0] > 0:
            return flat
        return flat.map(lambda t: torch.cat([t, t.new_zeros((1, *t.shape[1:]))]))

    def count(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Number of valid elements over `dim`, as torch means it: int64."""
        return self.count_over(wrap_dims(dim, self.ndim), keepdim)

    def count_over(self, dims: Sequence[int], keepdim: bool = False) -> Tensor:
        """The same over non-negative dimensions, of which there may be none."""
        flat, sparse = self.flat, self.pattern.ndim
        valid = as_int8(full_mask(flat))
        inside = [d - sparse + 1 for d in dims if d >= sparse]
        per_element = valid.sum(inside, dtype=torch.int64, keepdim=True) if inside else valid.to(torch.int64)
        remaining = [d for d in range(sparse) if d not in dims]
        slices = math.prod(self.pattern.sizes[d] for d in remaining)
        zeros = per_element.new_zeros((slices, *per_element.shape[1:]))
        total = zeros.index_add(0, self.pattern.raveled(remaining), per_element)
        keepdim_shape = [1 if d in dims else size for d, size in enumerate(self.shape)]
        shape = keepdim_shape if keepdim else [size for d, size in enumerate(keepdim_shape) if d not in dims]
        return total.reshape(shape)
