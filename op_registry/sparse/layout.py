"""Layouts: how a pattern lists the elements that are stored, as small frozen values.

All that depends on a storage format stands here: what it is called, the order in which it lists elements, how its index
tensors are read, made and checked, how many sparse dimensions it has room for. Everything else asks the layout.

    COO                 Coo()                               coordinates of every element
    CSR, CSC            Compressed(by="row" or "column")    elements line by line, and where each line begins
    BSR, BSC            Compressed(by=…, blocks=True)       the same of blocks
    PACKED              Packed()                            CSR of a padded batch, whose rows are sequences

Another one is a subclass of :class:`Layout`, registered once: docs/add-a-storage.md.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.digests import digest_of_code, source_digest
from op_registry.records.validity import as_bool
from op_registry.sparse import convert
from op_registry.sparse.coordinates import Coordinates, ravel, unique_keys, unravel
from op_registry.sparse.well_formed import ascend, problem_of_compressed, problem_of_coo, rows_ascend

# Index tensors.
Pieces = tuple[Tensor, ...]
Block = tuple[int, int]

# The name of storage that stores every element: no layout of a pattern.
DENSE = str(torch.strided)


class Layout:
    """How a pattern lists elements of some dimensions, its sparse ones.

    A layout gives meaning to *pieces*, one or two index tensors. What is listed is an element, or a block of them; the
    last dimension of the last piece has one index for each. Nothing is listed twice, and all of it in `index_order`.

    A layout is *exact* if it can list any set of elements, and no others. One that is not (blocks have to be full, all
    rows may have to be of one length) has an exact sibling, `exact_sibling`, and says in `cover` how it lists a set
    of elements with others beside them, which are then stored and invalid.

    Subclasses are frozen dataclasses. Sizes are those of the sparse dimensions; of a layout of blocks, unless it says
    otherwise, in units of blocks.
    """

    # The least and the greatest number of sparse dimensions; None: any number.
    least: int = 1
    most: int | None = None
    # How many dimensions each of its pieces has.
    piece_dims: tuple[int, ...] = (1,)
    # The dimension that runs within a line, of a layout that lists elements line by line (see `ends`).
    line_dim: int = -1
    # Whether blocks are listed, and not single elements.
    blocks: bool = False
    # Whether rows are sequences, which may be attended to one at a time, and drawn dropout for as a padded batch.
    of_sequences: bool = False

    def __str__(self) -> str:
        return self.name

    # ------------------------------------------------------------------------------------------------------- names

    @property
    def name(self) -> str:
        """What files, compiled graphs and errors call it: torch's name, where torch has one."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    @property
    def short(self) -> str:
        """What tables and command lines call it."""
        return self.name.removeprefix("torch.sparse_")

    @functools.cached_property
    def torch_layout(self) -> torch.layout | None:
        """The torch.layout of that name; None where there is none."""
        prefix, _, name = self.name.partition(".")
        return getattr(torch, name) if prefix == "torch" else None

    @property
    def public(self) -> torch.layout | Layout:
        """What callers are told: the torch.layout, or where there is none, the value itself."""
        return self.torch_layout or self

    # ---------------------------------------------------------------------------------------------------- siblings

    @property
    def exact_sibling(self) -> Layout:
        """The layout that lists the same elements and no others; itself, if it is exact."""
        return self

    @functools.cached_property
    def exact(self) -> bool:
        """Whether it can list any elements without others beside them."""
        return self.exact_sibling is self

    @property
    def in_torch_sparse(self) -> Layout:
        """The layout in which one of torch's sparse tensors can hold the same elements."""
        if self.torch_layout in OF_TORCH:
            return self
        return COO if self.exact else self.exact_sibling.in_torch_sparse

    def takes_pieces_of(self, other: Layout, dims: int) -> bool:
        """Whether the pieces of another layout mean the same in this one, for so many sparse dimensions."""
        return self == other

    # -------------------------------------------------------------------------------------------------- dimensions

    def has_room(self, dims: int) -> bool:
        """Whether there can be so many sparse dimensions."""
        return self.least <= dims and (self.most is None or dims <= self.most)

    def with_room(self, dims: int) -> Layout:
        """For elements that are to be listed anew: the exact sibling, if it has room for the dimensions, else COO."""
        exact = self.exact_sibling
        return exact if exact.has_room(dims) else COO

    def default_dims(self, ndim: int) -> int:
        """How many dimensions of a tensor are sparse, where nobody says."""
        return ndim if self.most is None else min(ndim, self.most)

    def check_dims(self, shape: Sequence[int], sparse_dim: int | None) -> int:
        """How many dimensions of a tensor are to be sparse; ValueError where there cannot be so many."""
        shape = tuple(shape)
        dims = self.default_dims(len(shape)) if sparse_dim is None else sparse_dim
        if not self.has_room(dims) or dims > len(shape):
            most = len(shape) if self.most is None else min(self.most, len(shape))
            raise ValueError(
                f"{self.name} of a tensor of shape {shape} has at least {self.least} sparse "
                f"dimension{'s' * (self.least > 1)} and at most {most}, and is asked to have {dims}; the other "
                "dimensions are dense"
            )
        return dims

    def check_block(self, sizes: Sequence[int], block: Any) -> None:
        """ValueError where a block size is missing, is none, or does not divide a matrix of the last two sizes."""
        if block is not None and (not isinstance(block, (tuple, list, torch.Size)) or len(block) != 2):
            raise ValueError(f"a blocksize is (rows, columns), not {block!r}")
        if (block is not None) != self.blocks:
            raise ValueError(
                f"{self.name} needs a blocksize (rows, columns)" if block is None else f"{self.name} has no blocks"
            )
        if block is not None and (any(b < 1 for b in block) or sizes[-2] % block[0] or sizes[-1] % block[1]):
            raise ValueError(f"blocks of {tuple(block)} do not divide a matrix of {tuple(sizes[-2:])}")

    # ------------------------------------------------------------------------------------------------------- order

    def index_order(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Something given for each dimension, in the order by which elements are listed; twice: as it was."""
        return tuple(values)

    @property
    def row_major(self) -> bool:
        """Whether single elements are listed in the order of their positions, which a view does not change."""
        return not self.blocks

    # ---------------------------------------------------------------------------------------------- reading pieces

    def coordinates(self, pieces: Pieces, sizes: Sequence[int]) -> Coordinates:
        """For each sparse dimension the index of whatever is listed."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it lists")

    def positions(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor:
        """The position of whatever is listed in a dense tensor: int64, (listed,)."""
        return ravel(self.coordinates(pieces, sizes), sizes)

    def ends(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor | None:
        """Where each line begins and ends among what is listed, (lines + 1,); None: it is not listed line by line."""
        return None

    # ----------------------------------------------------------------------------------------------- making pieces

    def pieces_of(self, coordinates: Coordinates, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> Pieces:
        """The pieces that list distinct `places`, which come in order; of an exact layout, or of whole blocks."""
        raise NotImplementedError(f"{self.name} cannot list any elements: its exact sibling can")

    def cover(self, coordinates: Coordinates, sizes: Sequence[int], block: Block | None) -> tuple[Pieces, Tensor]:
        """The pieces that list distinct `places`, in any order, with as few others as may be, and where each of them is
        among the stored elements, (n,). Of a layout that is not exact; sizes are counted in elements.
        """
        raise NotImplementedError(f"{self.name} does not say how it lists elements with others beside them")

    def order_of(self, coordinates: Coordinates, sizes: Sequence[int]) -> Tensor:
        """The permutation that brings distinct `places` into the order in which they are listed."""
        return ravel(self.index_order(coordinates), self.index_order(sizes)).argsort()

    def from_mask(self, mask: Tensor) -> tuple[Coordinates, Pieces]:
        """Where an int8 mask is 1, in the order of this layout, and the pieces that list just that."""
        coordinates = self._nonzero(mask)
        return coordinates, self.pieces_of(coordinates, mask.shape)

    def _nonzero(self, mask: Tensor) -> Coordinates:
        order = self.index_order(range(mask.ndim))
        turned = mask if order == tuple(range(mask.ndim)) else mask.permute(order)
        return self.index_order(as_bool(turned).nonzero(as_tuple=True))

    def from_large_mask(
        self, mask: Tensor, carried: Sequence[Tensor], block: Block | None
    ) -> tuple[Pieces, list[Tensor]]:
        """The pieces that list where a mask is 1, or the blocks in which it is, and what tensors with the dimensions of
        the mask in front have there. For masks of which there should be no index as a whole, if it can be helped.
        """
        coordinates, pieces = self.from_mask(mask)
        return pieces, [t[coordinates] for t in carried]

    # ---------------------------------------------------------------------------------------------- checking pieces

    def problem_of_shapes(self, pieces: Pieces, sizes: Sequence[int]) -> str | None:
        """What is wrong with the shapes of pieces whose number and dimensions are right, in a few words."""
        return None

    def problem_of_indices(
        self, pieces: Pieces, sizes: Sequence[int], listed: int, block: Block | None = None
    ) -> str | None:
        """What is wrong with the indices in pieces that come from a file, beside `listed` values, in a few words.

        Kernels read and write out of bounds where something is. Sizes are counted in elements.
        """
        return problem_of_coo(torch.stack(self.coordinates(pieces, sizes)), sizes)

    def lists_in_order(self, pieces: Pieces, sizes: Sequence[int]) -> bool:
        """Whether everything is listed once and in order; of indices that are within bounds."""
        return ascend(self.index_order(self.coordinates(pieces, sizes)))

    # ------------------------------------------------------------------------------------------------ torch.sparse

    def pieces_in(self, tensor: Tensor) -> tuple[Pieces, Tensor]:
        """Index tensors and values of one of torch's own sparse tensors in this layout, both shared with it."""
        raise NotImplementedError(f"torch has no sparse tensors in {self.name}")

    def torch_tensor(self, pieces: Pieces, values: Tensor, size: tuple[int, ...], coalesced: bool) -> Tensor:
        """torch's own sparse tensor of these."""
        raise NotImplementedError(f"torch has no sparse tensors in {self.name}")


@dataclass(frozen=True)
class Coo(Layout):
    """Coordinates: one piece, (sparse dimensions, n)."""

    name = "torch.sparse_coo"
    piece_dims = (2,)

    def coordinates(self, pieces: Pieces, sizes: Sequence[int]) -> Coordinates:
        return tuple(pieces[0].unbind(0))

    def pieces_of(self, coordinates: Coordinates, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> Pieces:
        return (torch.stack(coordinates).to(dtype),)

    def from_large_mask(
        self, mask: Tensor, carried: Sequence[Tensor], block: Block | None
    ) -> tuple[Pieces, list[Tensor]]:
        indices, taken = convert.coordinates_by_row(mask, carried)
        return (indices,), taken

    def problem_of_shapes(self, pieces: Pieces, sizes: Sequence[int]) -> str | None:
        if pieces[0].shape[0] == len(sizes):
            return None
        return f"its indices have shape {tuple(pieces[0].shape)}, and it has {len(sizes)} sparse dimensions"

    def problem_of_indices(
        self, pieces: Pieces, sizes: Sequence[int], listed: int, block: Block | None = None
    ) -> str | None:
        return problem_of_coo(pieces[0], sizes)

    def pieces_in(self, tensor: Tensor) -> tuple[Pieces, Tensor]:
        return (tensor._indices(),), tensor._values()

    def torch_tensor(self, pieces: Pieces, values: Tensor, size: tuple[int, ...], coalesced: bool) -> Tensor:
        return torch.sparse_coo_tensor(pieces[0], values, size, is_coalesced=coalesced, check_invariants=False)


@dataclass(frozen=True)
class Compressed(Layout):
    """Line by line: where each row or column begins among what is listed, (lines + 1,), and the places in them, (n,).

    Batches are one long list of lines, so that they need not have the same number of elements each; only torch's own
    tensors want that.
    """

    by: Literal["row", "column"] = "row"
    blocks: bool = False

    least = 2
    piece_dims = (1, 1)

    # Asked at every call, and so remembered.

    @functools.cached_property
    def name(self) -> str:
        return f"torch.sparse_{'b' if self.blocks else 'c'}s{'c' if self.by_column else 'r'}"

    @functools.cached_property
    def by_column(self) -> bool:
        """Whether a line is a column."""
        return self.by == "column"

    @functools.cached_property
    def line_dim(self) -> int:  # type: ignore[override]
        return -2 if self.by_column else -1

    @functools.cached_property
    def row_major(self) -> bool:
        return not (self.by_column or self.blocks)

    @functools.cached_property
    def exact_sibling(self) -> Layout:
        return Compressed(self.by) if self.blocks else self

    def takes_pieces_of(self, other: Layout, dims: int) -> bool:
        alike = isinstance(other, Compressed) and (self.by, self.blocks) == (other.by, other.blocks)
        return alike and self.has_room(dims)

    def index_order(self, values: Sequence[Any]) -> tuple[Any, ...]:
        if self.by_column:
            return (*values[:-2], values[-1], values[-2])
        return tuple(values)

    def coordinates(self, pieces: Pieces, sizes: Sequence[int]) -> Coordinates:
        compressed, plain = pieces
        lines = torch.arange(compressed.shape[0] - 1, device=plain.device)
        line = torch.repeat_interleave(lines, compressed.diff(), output_size=plain.shape[0])
        each = sizes[-1] if self.by_column else sizes[-2]
        batch = unravel(line // each, sizes[:-2]) if len(sizes) > 2 else ()
        own = line % each if len(sizes) > 2 else line
        return (*batch, plain, own) if self.by_column else (*batch, own, plain)

    def positions(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor:
        compressed, plain = pieces
        rows, columns = sizes[-2:]
        line = torch.arange(compressed.shape[0] - 1, device=plain.device)
        if self.by_column:
            first = line if len(sizes) == 2 else line // columns * (rows * columns) + line % columns
            step = columns
        else:
            first, step = line * columns, 1
        first = torch.repeat_interleave(first, compressed.diff(), output_size=plain.shape[0])
        return first.add_(plain, alpha=step)

    def ends(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor | None:
        return pieces[0]

    def pieces_of(self, coordinates: Coordinates, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> Pieces:
        across, plain = (coordinates[-1], coordinates[-2]) if self.by_column else (coordinates[-2], coordinates[-1])
        lines_each = sizes[-1] if self.by_column else sizes[-2]
        lines = math.prod(sizes[:-2]) * lines_each
        line = ravel((*coordinates[:-2], across), (*sizes[:-2], lines_each))
        counts = torch.zeros(lines + 1, dtype=torch.int64, device=line.device)
        counts = counts.scatter_add(0, line + 1, torch.ones_like(line))
        return counts.cumsum(0).to(dtype), plain.to(dtype)

    def cover(self, coordinates: Coordinates, sizes: Sequence[int], block: Block | None) -> tuple[Pieces, Tensor]:
        if block is None:
            raise ValueError(f"{self.name} needs a block size")
        rows, columns = block
        grid = grid_of(sizes, block)
        of_block = (*coordinates[:-2], coordinates[-2] // rows, coordinates[-1] // columns)
        extents = self.index_order(grid)
        listed, which = unique_keys(ravel(self.index_order(of_block), extents), math.prod(extents))
        inside = which * (rows * columns) + coordinates[-2] % rows * columns + coordinates[-1] % columns
        return self.pieces_of(self.index_order(unravel(listed, extents)), grid), inside

    def from_mask(self, mask: Tensor) -> tuple[Coordinates, Pieces]:
        coordinates, across = self._nonzero(mask), self.line_dim
        ends = mask.sum(across, dtype=torch.int64).reshape(-1).cumsum(0)
        return coordinates, (torch.cat([ends.new_zeros(1), ends]), coordinates[across].contiguous())

    def from_large_mask(
        self, mask: Tensor, carried: Sequence[Tensor], block: Block | None
    ) -> tuple[Pieces, list[Tensor]]:
        if block is not None:
            return convert.by_block(mask, carried, block, self.by_column)
        return convert.by_column(mask, carried) if self.by_column else convert.by_row(mask, carried)

    def problem_of_indices(
        self, pieces: Pieces, sizes: Sequence[int], listed: int, block: Block | None = None
    ) -> str | None:
        rows, columns, batches = *sizes[-2:], math.prod(sizes[:-2])
        matrix = (rows, columns * batches) if self.by_column else (rows * batches, columns)
        return problem_of_compressed(self.by_column, matrix, (pieces[0], pieces[1]), listed, block)

    def lists_in_order(self, pieces: Pieces, sizes: Sequence[int]) -> bool:
        return rows_ascend(*pieces)

    def pieces_in(self, tensor: Tensor) -> tuple[Pieces, Tensor]:
        if self.by_column:
            return (tensor.ccol_indices(), tensor.row_indices()), tensor.values()
        return (tensor.crow_indices(), tensor.col_indices()), tensor.values()

    def torch_tensor(self, pieces: Pieces, values: Tensor, size: tuple[int, ...], coalesced: bool) -> Tensor:
        compressed, plain = pieces
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size, layout=self.torch_layout, check_invariants=False
        )


@dataclass(frozen=True)
class Packed(Compressed):
    """CSR under another name: a padded batch (B, T, *dense) is B rows of T elements each, of which those are stored
    that a sequence has.

    It says what the tensor is, so that what is only sound for batches of sequences (drawing dropout for the padded
    shape, attention one sequence at a time) can ask for it.
    """

    name = "torch.jagged"  # type: ignore[assignment]
    short = "packed"  # type: ignore[assignment]
    most = 2
    of_sequences = True

    @property
    def in_torch_sparse(self) -> Layout:
        return CSR

    def check_dims(self, shape: Sequence[int], sparse_dim: int | None) -> int:
        shape = tuple(shape)
        if len(shape) < 2 or sparse_dim not in (None, 2):
            raise ValueError(
                f"packed storage is that of a batch (B, T, …), of which the first 2 dimensions are sparse: shape "
                f"{shape} cannot be stored so{'' if sparse_dim is None else f' with sparse_dim={sparse_dim}'}"
            )
        return 2


def grid_of(sizes: Sequence[int], block: Block) -> tuple[int, ...]:
    """Sizes in units of blocks."""
    return (*sizes[:-2], sizes[-2] // block[0], sizes[-1] // block[1])


COO = Coo()
CSR, CSC = Compressed("row"), Compressed("column")
BSR, BSC = Compressed("row", blocks=True), Compressed("column", blocks=True)
PACKED = Packed()
BUILT_IN = (COO, CSR, CSC, BSR, BSC, PACKED)

# torch's own sparse layouts.
OF_TORCH = tuple(layout.torch_layout for layout in BUILT_IN if not layout.of_sequences)

_by_name: dict[str, Layout] = {layout.name: layout for layout in BUILT_IN}
_of_torch: dict[torch.layout, Layout] = {
    getattr(torch, name.removeprefix("torch.")): _by_name[name] for name in _by_name
}
_versions: dict[str, str] = {}


def register_layout(layout: Layout) -> Layout:
    """Let a layout be known by its name, to files, compiled graphs and tests; returns it.

    Raises ValueError for a name that another one has, and for a number of pieces that a tensor has no room for.
    """
    if _by_name.get(layout.name, layout) != layout or layout.name == DENSE:
        raise ValueError(f"there is another storage called {layout.name}")
    if len(layout.piece_dims) not in (1, 2):
        raise ValueError(f"{layout.name} has {len(layout.piece_dims)} index tensors, and a tensor keeps one or two")
    _by_name[layout.name] = layout
    _versions[layout.name] = _state_of_sources(type(layout))
    return layout


def _state_of_sources(kind: type[Layout]) -> str:
    """A digest of the file that a layout is written in; of a notebook's one that nothing else ever has."""
    try:
        return source_digest(inspect.getsourcefile(kind) or "")
    except TypeError:
        return digest_of_code(object())


def layout_named(name: str) -> Layout:
    """The layout of that name; KeyError without one."""
    return _by_name[name]


def layout_called(short: str) -> Layout | None:
    """The layout that tables and command lines call so; None without one."""
    return next((layout for layout in _by_name.values() if layout.short == short), None)


def layout_of(given: Any) -> Layout | None:
    """The layout that a torch.layout names, or a registered layout itself; None for anything else."""
    if isinstance(given, torch.layout):
        return _of_torch.get(given)
    return given if isinstance(given, Layout) and _by_name.get(given.name) == given else None


def layout_names() -> tuple[str, ...]:
    """The names of all registered layouts."""
    return tuple(_by_name)


def version_of(layout: Layout) -> str:
    """The state of the sources of somebody's layout, for graphs on disk; "" for those that the registry names."""
    return _versions.get(layout.name, "")
