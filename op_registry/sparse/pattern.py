"""Patterns: which elements of a tensor are stored, in each of torch's sparse layouts, and packed.

A pattern speaks of a tensor's first dimensions, its sparse ones; behind them, a stored value may have dense dimensions
of its own (torch calls that hybrid). Values are held apart from it, in the order in which the pattern lists them:
``(n, *dense)``, or ``(blocks, block rows, block columns, *dense)`` in layouts of blocks.

Every element is listed at most once, in ascending order: by all sparse dimensions in COO, CSR and BSR, and by column
before row in CSC and BSC. Batches of a compressed layout are one long list of rows (or columns), so that they need not
have the same number of values each; only torch's own tensors want that.

Packed (``torch.jagged``) is CSR under another name: a padded batch (B, T, *dense) is B rows of T places each, of which
those are stored that a sequence has. It says what the tensor is, so that what is only sound for batches of sequences
(drawing dropout for the padded shape, attention one sequence at a time) can ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced

Coordinates = tuple[Tensor, ...]

PACKED = torch.jagged
OF_TORCH = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
LAYOUTS = (*OF_TORCH, PACKED)
BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
OF_BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)


class Pattern:
    """Which elements of a tensor are stored.

    layout  one of torch's five sparse layouts, or PACKED, which has exactly two sparse dimensions: (B, T)
    sizes   of the sparse dimensions
    pieces  the index tensors, int64 or int32. COO: indices of shape (sparse dimensions, n). The others: compressed
            indices of shape (batches · rows + 1,), which count from 0 up to n, and plain indices of shape (n,)
    block   (rows, columns) of a block, where the layout has blocks
    """

    __slots__ = ("_remembered", "block", "layout", "lead", "pieces", "sizes")

    def __init__(
        self,
        layout: torch.layout,
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
        """How many elements each row (or column) stores, as numbers; of a compressed layout without blocks."""
        return self.remembered("lengths", lambda: self.pieces[0].diff().tolist())

    def at(self) -> Tensor:
        """The position of every stored element in a tensor of `sizes`, int64 of shape (stored,)."""
        return self.remembered(
            "at", lambda: self.positions() if self.block is None else ravel(self.places(), self.sizes)
        )

    def viewed(self, sizes: Sequence[int], layout: torch.layout) -> Pattern:
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
            listed = ravel(self._ordered(self.listed()), self._ordered(self.listed_sizes()))
            return torch.cat([listed, listed.new_full((1,), torch.iinfo(torch.int64).max)])

        return self.remembered("keys", keys)

    def positions(self) -> Tensor:
        """The position of each listed element (or block) in a dense tensor of them all: int64, (listed,)."""
        sizes = self.listed_sizes()
        if self.layout is torch.sparse_coo:
            return ravel(self.listed(), sizes)
        compressed, plain = self.pieces
        rows, columns = sizes[-2:]
        line = torch.arange(compressed.shape[0] - 1, device=self.device)
        if self.layout in BY_COLUMN:
            first = line if len(sizes) == 2 else line // columns * (rows * columns) + line % columns
            step = columns
        else:
            first, step = line * columns, 1
        first = torch.repeat_interleave(first, compressed.diff(), output_size=plain.shape[0])
        return first.add_(plain, alpha=step)

    def find(self, places: Coordinates) -> tuple[Tensor, Tensor]:
        """Where among the stored elements those at `places` are, and whether they are there; (n,), int64 and bool."""
        if self.block is None:
            inside, listed, sizes = None, places, self.sizes
        else:
            rows, columns = self.block
            inside = places[-2] % rows * columns + places[-1] % columns
            listed = (*places[:-2], places[-2] // rows, places[-1] // columns)
            sizes = self.listed_sizes()
        wanted, keys = ravel(self._ordered(listed), self._ordered(sizes)), self.keys()
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
        if self.layout is torch.sparse_coo:
            return tuple(self.pieces[0].unbind(0))
        compressed, plain = self.pieces
        sizes = self.listed_sizes()
        lines = compressed.shape[0] - 1
        line = torch.repeat_interleave(
            torch.arange(lines, device=self.device), compressed.diff(), output_size=plain.shape[0]
        )
        across = sizes[-1] if self.layout in BY_COLUMN else sizes[-2]
        batch = unravel(line // across, sizes[:-2]) if len(sizes) > 2 else ()
        own = line % across if len(sizes) > 2 else line
        rest = (plain, own) if self.layout in BY_COLUMN else (own, plain)
        return (*batch, *rest)

    def listed_sizes(self) -> tuple[int, ...]:
        """Sizes of the sparse dimensions, in units of blocks."""
        if self.block is None:
            return self.sizes
        return (*self.sizes[:-2], self.sizes[-2] // self.block[0], self.sizes[-1] // self.block[1])

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

    def _ordered(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return in_index_order(self.layout, values)

    def remembered(self, name: Any, compute: Callable[[], Any]) -> Any:
        """A fact about the pattern, remembered unless it is being traced, or could not be saved for a backward."""
        if being_traced(self.pieces[0]) or torch.is_inference_mode_enabled():
            return compute()
        if name not in self._remembered:
            self._remembered[name] = compute()
        return self._remembered[name]


def in_index_order(layout: torch.layout, values: Sequence[Any]) -> tuple[Any, ...]:
    """Something given for each dimension, in the order by which `layout` lists elements; twice: as it was."""
    if layout in BY_COLUMN:
        return (*values[:-2], values[-1], values[-2])
    return tuple(values)


def ravel(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """One number for each place: its position in a tensor of `sizes`, int64.

    Raises ValueError for a tensor with more places than int64 can number (torch makes none).
    """
    if all(type(size) is int for size in sizes) and math.prod(sizes) > 2**63:
        raise ValueError(
            f"a tensor of sizes {tuple(sizes)} has {math.prod(sizes):,} places, more than int64 can number: "
            "leave some dimensions dense, or split it"
        )
    total = torch.zeros_like(places[0], dtype=torch.int64)
    for place, size in zip(places, sizes, strict=True):
        total = total * size + place
    return total


def unravel(positions: Tensor, sizes: Sequence[int]) -> Coordinates:
    """The place of each position in a tensor of `sizes`; the reverse of :func:`linear`."""
    found = []
    for size in reversed(sizes):
        found.append(positions % size)
        positions = positions // size
    return tuple(reversed(found))


def pattern_of(
    layout: torch.layout, places: Coordinates, sizes: Sequence[int], index_dtype: torch.dtype = torch.int64
) -> Pattern:
    """The pattern of elements at distinct `places`, which come in the order of `layout`; not one of blocks."""
    if layout is torch.sparse_coo:
        return Pattern(layout, sizes, (torch.stack(places).to(index_dtype),))
    by_column = layout in BY_COLUMN
    across, plain = (places[-1], places[-2]) if by_column else (places[-2], places[-1])
    lines_each = sizes[-1] if by_column else sizes[-2]
    lines = math.prod(sizes[:-2]) * lines_each
    line = ravel((*places[:-2], across), (*sizes[:-2], lines_each))
    counts = torch.zeros(lines + 1, dtype=torch.int64, device=line.device)
    counts = counts.scatter_add(0, line + 1, torch.ones_like(line))
    return Pattern(layout, sizes, (counts.cumsum(0).to(index_dtype), plain.to(index_dtype)))


def index_order(layout: torch.layout, places: Coordinates, sizes: Sequence[int]) -> Tensor:
    """The permutation that brings distinct `places` into the order in which `layout` lists them."""
    return ravel(in_index_order(layout, places), in_index_order(layout, sizes)).argsort()
