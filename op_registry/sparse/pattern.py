"""Patterns: which elements of a tensor are stored, in some layout (layout.py).

A pattern speaks of a tensor's first dimensions, its sparse ones; behind them, a stored value may have dense dimensions
of its own (torch calls that hybrid). Values are held apart from it, in the order in which the pattern lists them:
``(n, *dense)``, or ``(blocks, block rows, block columns, *dense)`` in layouts of blocks.

Every element is listed at most once, in the order of the layout. What the index tensors mean, the layout says; this
module adds what follows from it for all of them, and remembers what has been found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced
from op_registry.sparse.coordinates import Coordinates, ravel, unravel
from op_registry.sparse.layout import Layout, grid_of


class Pattern:
    """Which elements of a tensor are stored.

    layout  how its elements are listed
    sizes   of the sparse dimensions
    pieces  the index tensors, int64 or int32, as the layout has them
    block   (rows, columns) of a block, where the layout has blocks
    """

    __slots__ = ("_remembered", "block", "layout", "lead", "pieces", "sizes")

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
        # How many dimensions of the values the pattern lists elements in.
        self.lead = 3 if block else 1
        self._remembered: dict[str, Any] = {}

    def __repr__(self) -> str:
        block = f", block={self.block}" if self.block else ""
        return f"Pattern({self.layout}, sizes={self.sizes}, stored={self.stored}{block})"

    @property
    def ndim(self) -> int:
        """Number of sparse dimensions."""
        return len(self.sizes)

    @property
    def stored(self) -> int:
        """Number of stored elements."""
        return self.pieces[-1].shape[-1] * math.prod(self.block or ())

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def to(self, device: torch.device) -> Pattern:
        """The same pattern on a device; itself, if it is there."""
        if self.device == device:
            return self
        return self.with_pieces(tuple(piece.to(device) for piece in self.pieces))

    def with_pieces(self, pieces: tuple[Tensor, ...]) -> Pattern:
        """The same pattern made of other index tensors, which hold the same; nothing is remembered of it."""
        return Pattern(self.layout, self.sizes, pieces, self.block)

    def same_as(self, other: Pattern) -> bool:
        """Whether the two list the same elements because they are made of the same index tensors."""
        if self is other:
            return True
        alike = (self.layout, self.sizes, self.block) == (other.layout, other.sizes, other.block)
        return alike and all(a is b for a, b in zip(self.pieces, other.pieces, strict=True))

    # ------------------------------------------------------------------------------------------- what is stored where

    def lengths(self) -> list[int]:
        """How many elements each line stores, as numbers; of a layout that lists single elements line by line."""

        def lengths() -> list[int]:
            ends = self.ends()
            assert ends is not None
            found: list[int] = ends.diff().tolist()
            return found

        return self.remembered("lengths", lengths)

    def ends(self) -> Tensor | None:
        """Where each line begins and ends among the stored elements, if they are stored line by line: (lines + 1,)."""
        return None if self.block is not None else self.layout.ends(self.pieces, self.sizes)

    def at(self) -> Tensor:
        """The position of every stored element in a tensor of `sizes`, int64 of shape (stored,)."""
        return self.remembered(
            "at", lambda: self.positions() if self.block is None else ravel(self.places(), self.sizes)
        )

    def viewed(self, sizes: Sequence[int], layout: Layout) -> Pattern:
        """The same elements of a tensor viewed in other sizes; the same object each time, to be recognised by."""
        shape = tuple(sizes)
        return self.remembered(f"viewed {shape}", lambda: pattern_of(layout, unravel(self.at(), shape), shape))

    def places(self) -> Coordinates:
        """For each sparse dimension the index of every stored element, int64 of shape (stored,)."""
        return self.remembered("places", self._places)

    def keys(self) -> Tensor:
        """One ascending number for each listed element (or block), and one behind all of them.

        That one is always there to be looked at: a graph cannot ask whether there are others.
        """

        def keys() -> Tensor:
            listed = ravel(self.layout.index_order(self.listed()), self.layout.index_order(self.listed_sizes()))
            return torch.cat([listed, listed.new_full((1,), torch.iinfo(torch.int64).max)])

        return self.remembered("keys", keys)

    def positions(self) -> Tensor:
        """The position of each listed element (or block) in a dense tensor of them all: int64, (listed,)."""
        return self.layout.positions(self.pieces, self.listed_sizes())

    def find(self, places: Coordinates) -> tuple[Tensor, Tensor]:
        """Where among the stored elements those at `places` are, and whether they are there; (n,), int64 and bool."""
        if self.block is None:
            inside, listed, sizes = None, places, self.sizes
        else:
            rows, columns = self.block
            inside = places[-2] % rows * columns + places[-1] % columns
            listed = (*places[:-2], places[-2] // rows, places[-1] // columns)
            sizes = self.listed_sizes()
        wanted, keys = ravel(self.layout.index_order(listed), self.layout.index_order(sizes)), self.keys()
        position = torch.searchsorted(keys, wanted)
        found = keys[position] == wanted
        if inside is not None:
            position = position * math.prod(self.block or ()) + inside
        return torch.where(found, position, 0), found

    def fold(self, flat: Tensor) -> Tensor:
        """Values one after another, as the pattern lists them: in blocks, where it has some."""
        if self.block is None:
            return flat
        return flat.unflatten(0, (-1, *self.block))

    def listed(self) -> Coordinates:
        """The place of each listed element or block, in units of blocks; in the dtype of the pieces or int64."""
        return self.layout.coordinates(self.pieces, self.listed_sizes())

    def listed_sizes(self) -> tuple[int, ...]:
        """Sizes of the sparse dimensions, in units of blocks."""
        return self.sizes if self.block is None else grid_of(self.sizes, self.block)

    def _places(self) -> Coordinates:
        listed = tuple(p.to(torch.int64) for p in self.listed())
        if self.block is None:
            return listed
        rows, columns = self.block
        shape = (listed[0].shape[0], rows, columns)
        at_row = torch.arange(rows, device=self.device).view(1, -1, 1)
        at_column = torch.arange(columns, device=self.device).view(1, 1, -1)
        wide = [p.view(-1, 1, 1) for p in listed]
        wide[-2], wide[-1] = wide[-2] * rows + at_row, wide[-1] * columns + at_column
        return tuple(p.expand(shape).reshape(-1) for p in wide)

    def remembered(self, name: Any, compute: Callable[[], Any]) -> Any:
        """A fact about the pattern, remembered unless it is being traced, or could not be saved for a backward."""
        if being_traced(self.pieces[0]) or torch.is_inference_mode_enabled():
            return compute()
        if name not in self._remembered:
            self._remembered[name] = compute()
        return self._remembered[name]


def pattern_of(
    layout: Layout, places: Coordinates, sizes: Sequence[int], index_dtype: torch.dtype = torch.int64
) -> Pattern:
    """The pattern of elements at distinct `places`, which come in the order of an exact layout."""
    return Pattern(layout, sizes, layout.pieces_of(places, sizes, index_dtype))
