"""Layouts: how a sparsity pattern lists the stored elements, as small frozen values.

Everything that depends on a storage format is here: the layout's name, the order in which it lists elements, how its
index tensors are read, built and checked, and how many sparse dimensions it supports. Other modules ask the layout.

    COO         Coo()                               coordinates of every element
    CSR, CSC    Compressed(by="row" or "column")    elements row by row, and where each row starts
    BSR, BSC    Compressed(by=..., blocks=True)     the same for blocks
    PACKED      Packed()                            CSR of a padded batch, whose rows are sequences

They are found by name. Another layout is a subclass of :class:`Layout`, registered once: docs/add-a-storage.md.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from op_registry.digests import digest_of_code, source_digest
from op_registry.older_torch import warn_of_unchecked_sparse_tensors, with_contiguous_strides
from op_registry.records.validity import as_bool
from op_registry.sparse import compaction
from op_registry.sparse.coordinates import (
    Coordinates,
    ascend,
    problem_of_compressed,
    problem_of_coo,
    ravel,
    rows_ascend,
    unique_keys,
    unravel,
)

# Index tensors.
Pieces = tuple[Tensor, ...]
Block = tuple[int, int]
T = TypeVar("T")

# The name of dense storage, which has no pattern.
DENSE = str(torch.strided)
# The layouts of torch's own sparse tensors.
OF_TORCH = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Layout:
    """How a pattern lists elements of its sparse dimensions.

    A layout interprets *pieces*, one or two index tensors. They list elements, or blocks of elements; the last
    dimension of the last piece has one index for each. Entries are distinct, and in the order given by `index_order`.

    A layout is *exact* if it can list any set of elements and no others. An inexact one (blocks have to be full, or all
    rows of one length) has an exact sibling, `exact_sibling`. Its `cover` lists a set of elements with others as
    padding; those are stored and invalid.

    Subclasses are frozen dataclasses. `sizes` are those of the sparse dimensions, in units of blocks in block layouts
    unless a method says otherwise.
    """

    # The smallest and the largest number of sparse dimensions; None: no limit.
    min_dims: int = 1
    max_dims: int | None = None
    # The number of dimensions of each piece.
    piece_dims: tuple[int, ...] = (1,)
    # The dimension whose index varies within a row, for layouts that list elements row by row (see `ends`).
    inner_dim: int = -1
    # Whether entries are blocks rather than single elements.
    blocks: bool = False
    # Whether rows are sequences: attention may run on one at a time, and dropout draws numbers for the padded batch.
    of_sequences: bool = False

    def __str__(self) -> str:
        return self.name

    # ------------------------------------------------------------------------------------------------------- names

    @property
    def name(self) -> str:
        """The name in files, compiled graphs and errors: torch's name, if torch has the layout."""
        raise NotImplementedError(f"{type(self).__name__} has no name")

    @property
    def short(self) -> str:
        """The name in tables and on command lines."""
        return self.name.removeprefix("torch.sparse_")

    @functools.cached_property
    def torch_layout(self) -> torch.layout | None:
        """The torch.layout of that name, if there is one."""
        prefix, _, name = self.name.partition(".")
        return getattr(torch, name) if prefix == "torch" else None

    @property
    def public(self) -> torch.layout | Layout:
        """What users see as a tensor's layout: the torch.layout, or this value if torch has none."""
        return self.torch_layout or self

    # ---------------------------------------------------------------------------------------------------- siblings

    @property
    def exact_sibling(self) -> Layout:
        """The layout that lists the same elements without padding; itself, if it is exact."""
        return self

    @functools.cached_property
    def exact(self) -> bool:
        """Whether it can list any set of elements without padding."""
        return self.exact_sibling is self

    @property
    def in_torch_sparse(self) -> Layout:
        """The layout in which one of torch's sparse tensors can hold the same elements."""
        if self.torch_layout in OF_TORCH:
            return self
        return COO if self.exact else self.exact_sibling.in_torch_sparse

    def takes_pieces_of(self, other: Layout, dims: int) -> bool:
        """Whether another layout's pieces have the same meaning in this one, for `dims` sparse dimensions."""
        return self == other

    # -------------------------------------------------------------------------------------------------- dimensions

    def has_room(self, dims: int) -> bool:
        """Whether it supports `dims` sparse dimensions."""
        return self.min_dims <= dims and (self.max_dims is None or dims <= self.max_dims)

    def with_room(self, dims: int) -> Layout:
        """The layout for a result with `dims` sparse dimensions: the exact sibling if it supports them, else COO."""
        exact = self.exact_sibling
        return exact if exact.has_room(dims) else COO

    def default_dims(self, ndim: int) -> int:
        """The number of sparse dimensions of a tensor, unless the caller states one."""
        return ndim if self.max_dims is None else min(ndim, self.max_dims)

    def check_dims(self, shape: Sequence[int], sparse_dim: int | None) -> int:
        """The number of sparse dimensions for a tensor; ValueError if the layout does not support it."""
        shape = tuple(shape)
        dims = self.default_dims(len(shape)) if sparse_dim is None else sparse_dim
        if not self.has_room(dims) or dims > len(shape):
            most = len(shape) if self.max_dims is None else min(self.max_dims, len(shape))
            raise ValueError(
                f"{self.name} of a tensor of shape {shape} has at least {self.min_dims} sparse "
                f"dimension{'s' * (self.min_dims > 1)} and at most {most}, not {dims}; the other dimensions are dense"
            )
        return dims

    def check_block(self, sizes: Sequence[int], block: Sequence[int] | None) -> None:
        """ValueError if a block size is missing, invalid, or does not divide the last two of `sizes` (in elements)."""
        if block is not None and (not isinstance(block, (tuple, list, torch.Size)) or len(block) != 2):
            raise ValueError(f"a blocksize is (rows, columns), not {block!r}")
        if (block is not None) != self.blocks:
            raise ValueError(
                f"{self.name} needs a blocksize (rows, columns)" if block is None else f"{self.name} has no blocks"
            )
        if block is not None and (any(b < 1 for b in block) or sizes[-2] % block[0] or sizes[-1] % block[1]):
            raise ValueError(f"blocks of {tuple(block)} do not divide a matrix of {tuple(sizes[-2:])}")

    # ------------------------------------------------------------------------------------------------------- order

    def index_order(self, values: Sequence[T]) -> tuple[T, ...]:
        """Permute per-dimension values into the layout's index order. Self-inverse."""
        return tuple(values)

    @property
    def row_major(self) -> bool:
        """Whether single elements are listed in row-major order, which views preserve."""
        return not self.blocks

    # ---------------------------------------------------------------------------------------------- reading pieces

    def coordinates(self, pieces: Pieces, sizes: Sequence[int]) -> Coordinates:
        """The index of each listed entry in every sparse dimension."""
        raise NotImplementedError(f"{type(self).__name__} does not implement coordinates")

    def positions(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor:
        """The position of each listed entry in the flattened dense tensor: int64, (listed,)."""
        return ravel(self.coordinates(pieces, sizes), sizes)

    def ends(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor | None:
        """Where each row (or column) starts and ends among the entries, (rows + 1,); None if they are not by row."""
        return None

    # --------------------------------------------------------------------------------------------- building pieces

    def pieces_of(self, coordinates: Coordinates, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> Pieces:
        """The pieces that list entries at distinct coordinates, given in order: elements (exact layouts) or blocks."""
        raise NotImplementedError(f"{self.name} cannot list arbitrary elements: use its exact sibling")

    def cover(self, coordinates: Coordinates, sizes: Sequence[int], block: Block | None) -> tuple[Pieces, Tensor]:
        """For inexact layouts: the pieces that list elements at distinct coordinates, in any order, with as little
        padding as possible, and the slot of each element among the stored ones, (n,). Sizes are in elements.
        """
        raise NotImplementedError(f"{self.name} is not exact, and does not implement cover")

    def order_of(self, coordinates: Coordinates, sizes: Sequence[int]) -> Tensor:
        """The permutation that sorts distinct coordinates into the layout's order."""
        return ravel(self.index_order(coordinates), self.index_order(sizes)).argsort()

    def from_mask(self, mask: Tensor) -> tuple[Coordinates, Pieces]:
        """The coordinates of the ones of an int8 mask, in the layout's order, and the pieces that list them."""
        coordinates = self._nonzero(mask)
        return coordinates, self.pieces_of(coordinates, mask.shape)

    def _nonzero(self, mask: Tensor) -> Coordinates:
        order = self.index_order(range(mask.ndim))
        permuted = mask if order == tuple(range(mask.ndim)) else mask.permute(order)
        return self.index_order(as_bool(permuted).nonzero(as_tuple=True))

    def from_large_mask(
        self, mask: Tensor, carried: Sequence[Tensor], block: Block | None
    ) -> tuple[Pieces, list[Tensor]]:
        """The pieces that list the ones of a mask, or the blocks that contain them, and what `carried` tensors, whose
        leading dimensions are the mask's, hold there. For large masks: overrides avoid an index of the whole mask.
        """
        coordinates, pieces = self.from_mask(mask)
        return pieces, [t[coordinates] for t in carried]

    # ---------------------------------------------------------------------------------------------- checking pieces

    def problem_of_shapes(self, pieces: Pieces, sizes: Sequence[int]) -> str | None:
        """A short description of a problem with the shapes of pieces of the right number and dimensions, or None."""
        return None

    def problem_of_indices(
        self, pieces: Pieces, sizes: Sequence[int], listed: int, block: Block | None = None
    ) -> str | None:
        """A short description of a problem with the indices in pieces from a file with `listed` values, or None.

        Kernels would read and write out of bounds. Sizes are in elements.
        """
        return problem_of_coo(torch.stack(self.coordinates(pieces, sizes)), sizes)

    def lists_in_order(self, pieces: Pieces, sizes: Sequence[int]) -> bool:
        """Whether entries are distinct and in order; indices are within bounds."""
        return ascend(self.index_order(self.coordinates(pieces, sizes)))

    # ------------------------------------------------------------------------------------------------ torch.sparse

    def pieces_in(self, tensor: Tensor) -> tuple[Pieces, Tensor]:
        """The index tensors and values of a torch sparse tensor in this layout, sharing memory with it."""
        raise NotImplementedError(f"torch has no sparse tensors in {self.name}")

    def torch_tensor(self, pieces: Pieces, values: Tensor, size: tuple[int, ...], coalesced: bool) -> Tensor:
        """The torch sparse tensor with these pieces and values."""
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
        indices, gathered = compaction.coordinates_by_row(mask, carried)
        return (indices,), gathered

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


warn_of_unchecked_sparse_tensors()
COO = Coo()


def grid_of(sizes: Sequence[int], block: Block) -> tuple[int, ...]:
    """Sizes in units of blocks."""
    return (*sizes[:-2], sizes[-2] // block[0], sizes[-1] // block[1])


# --------------------------------------------------------------------------------------------------- compressed layouts


@dataclass(frozen=True)
class Compressed(Layout):
    """Two pieces: where each *line* starts among the entries, (lines + 1,), and the index of each entry in it, (n,).

    A line is a row, or with `by="column"` a column. Entries are elements, or blocks. Batches are one long list of lines
    and need not have equal nnz; only torch's own tensors require that.
    """

    by: Literal["row", "column"] = "row"
    blocks: bool = False

    min_dims = 2
    piece_dims = (1, 1)

    # Cached, since every call asks for these.

    @functools.cached_property
    def name(self) -> str:
        return f"torch.sparse_{'b' if self.blocks else 'c'}s{'c' if self.by_column else 'r'}"

    @functools.cached_property
    def by_column(self) -> bool:
        """Whether columns are compressed rather than rows."""
        return self.by == "column"

    @functools.cached_property
    def inner_dim(self) -> int:  # type: ignore[override]
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

    def index_order(self, values: Sequence[T]) -> tuple[T, ...]:
        if self.by_column:
            return (*values[:-2], values[-1], values[-2])
        return tuple(values)

    def coordinates(self, pieces: Pieces, sizes: Sequence[int]) -> Coordinates:
        starts, plain = pieces
        all_lines = torch.arange(starts.shape[0] - 1, device=plain.device)
        line = torch.repeat_interleave(all_lines, starts.diff(), output_size=plain.shape[0])
        batch: Coordinates = ()
        if len(sizes) > 2:
            lines = sizes[-1] if self.by_column else sizes[-2]
            batch, line = unravel(line // lines, sizes[:-2]), line % lines
        return (*batch, plain, line) if self.by_column else (*batch, line, plain)

    def positions(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor:
        starts, plain = pieces
        rows, columns = sizes[-2:]
        line = torch.arange(starts.shape[0] - 1, device=plain.device)
        if self.by_column:
            first = line if len(sizes) == 2 else line // columns * (rows * columns) + line % columns
            step = columns
        else:
            first, step = line * columns, 1
        first = torch.repeat_interleave(first, starts.diff(), output_size=plain.shape[0])
        return first.add_(plain, alpha=step)

    def ends(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor | None:
        return pieces[0]

    def pieces_of(self, coordinates: Coordinates, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> Pieces:
        outer, plain = self._outer_and_inner(coordinates)
        lines, _ = self._outer_and_inner(sizes)
        line = ravel((*coordinates[:-2], outer), (*sizes[:-2], lines))
        counts = torch.zeros(math.prod(sizes[:-2]) * lines + 1, dtype=torch.int64, device=line.device)
        counts = counts.scatter_add(0, line + 1, torch.ones_like(line))
        return counts.cumsum(0).to(dtype), plain.to(dtype)

    def _outer_and_inner(self, values: Sequence[T]) -> tuple[T, T]:
        """The values of the compressed dimension and of the other one."""
        return (values[-1], values[-2]) if self.by_column else (values[-2], values[-1])

    def cover(self, coordinates: Coordinates, sizes: Sequence[int], block: Block | None) -> tuple[Pieces, Tensor]:
        if block is None:
            raise ValueError(f"{self.name} needs a block size")
        rows, columns = block
        grid = grid_of(sizes, block)
        of_block = (*coordinates[:-2], coordinates[-2] // rows, coordinates[-1] // columns)
        extents = self.index_order(grid)
        unique, inverse = unique_keys(ravel(self.index_order(of_block), extents), math.prod(extents))
        slots = inverse * (rows * columns) + coordinates[-2] % rows * columns + coordinates[-1] % columns
        return self.pieces_of(self.index_order(unravel(unique, extents)), grid), slots

    def from_mask(self, mask: Tensor) -> tuple[Coordinates, Pieces]:
        coordinates = self._nonzero(mask)
        ends = mask.sum(self.inner_dim, dtype=torch.int64).reshape(-1).cumsum(0)
        return coordinates, (torch.cat([ends.new_zeros(1), ends]), coordinates[self.inner_dim].contiguous())

    def from_large_mask(
        self, mask: Tensor, carried: Sequence[Tensor], block: Block | None
    ) -> tuple[Pieces, list[Tensor]]:
        if block is not None:
            return compaction.by_block(mask, carried, block, self.by_column)
        return compaction.by_column(mask, carried) if self.by_column else compaction.by_row(mask, carried)

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
        starts, plain = pieces
        return torch_compressed(starts, plain, values, size, self.torch_layout)


def torch_compressed(
    starts: Tensor,
    plain: Tensor,
    values: Tensor,
    size: tuple[int, ...],
    layout: torch.layout | None,
    check: bool = False,
) -> Tensor:
    """torch's tensor of a compressed layout; of its beta state torch warns once, and not at a line of ours."""

    plain = with_contiguous_strides(plain)

    def tensor() -> Tensor:
        return torch.sparse_compressed_tensor(starts, plain, values, size, layout=layout, check_invariants=check)

    if layout in _made:
        return tensor()
    _made.add(layout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Sparse \w+ tensor support is in beta state", UserWarning)
        return tensor()


# The layouts of torch of which it has warned, or would have.
_made: set[torch.layout | None] = set()


@dataclass(frozen=True)
class Packed(Compressed):
    """CSR under another name: a padded batch (B, T, *dense) as B rows of up to T elements, the padding not stored.

    The type says that rows are sequences, for operators that are right for sequences only (drawing dropout for the
    padded shape, attention one sequence at a time).
    """

    name = "torch.jagged"  # type: ignore[assignment]
    short = "packed"  # type: ignore[assignment]
    max_dims = 2
    of_sequences = True

    @property
    def in_torch_sparse(self) -> Layout:
        return CSR

    def check_dims(self, shape: Sequence[int], sparse_dim: int | None) -> int:
        shape = tuple(shape)
        if len(shape) < 2 or sparse_dim not in (None, 2):
            asked = "" if sparse_dim is None else f" with sparse_dim={sparse_dim}"
            raise ValueError(
                f"packed storage is for a batch (B, T, ...) whose first 2 dimensions are sparse: shape {shape} cannot "
                f"be stored so{asked}"
            )
        return 2


CSR, CSC = Compressed("row"), Compressed("column")
BSR, BSC = Compressed("row", blocks=True), Compressed("column", blocks=True)
PACKED = Packed()


# ------------------------------------------------------------------------------------------------------ layouts by name

BUILT_IN = (COO, CSR, CSC, BSR, BSC, PACKED)

_by_name: dict[str, Layout] = {layout.name: layout for layout in BUILT_IN}
_of_torch: dict[torch.layout, Layout] = {
    getattr(torch, name.removeprefix("torch.")): _by_name[name] for name in _by_name
}
_versions: dict[str, str] = {}


def register_layout(layout: Layout) -> Layout:
    """Make a layout known by its name to files, compiled graphs and tests; returns it.

    Raises ValueError if another layout has the name, or if a tensor cannot hold its number of pieces.
    """
    if _by_name.get(layout.name, layout) != layout or layout.name == DENSE:
        raise ValueError(f"there is another storage called {layout.name}")
    if len(layout.piece_dims) not in (1, 2):
        raise ValueError(f"{layout.name} has {len(layout.piece_dims)} index tensors, and a tensor holds one or two")
    _by_name[layout.name] = layout
    _versions[layout.name] = _digest_of_sources(type(layout))
    return layout


def _digest_of_sources(kind: type[Layout]) -> str:
    """A digest of the file that defines a layout; a unique one for a layout defined in a notebook or at a prompt."""
    try:
        return source_digest(inspect.getsourcefile(kind) or "")
    except (OSError, TypeError):  # OSError: typed at a prompt
        return digest_of_code(object())


def layout_named(name: str) -> Layout:
    """The layout of that name; KeyError without one."""
    return _by_name[name]


def layout_called(short: str) -> Layout | None:
    """The layout with that short name, as used in tables and on command lines; None without one."""
    return next((layout for layout in _by_name.values() if layout.short == short), None)


def layout_of(layout: object) -> Layout | None:
    """The layout for a torch.layout, or a registered layout itself; None for anything else."""
    if isinstance(layout, torch.layout):
        return _of_torch.get(layout)
    return layout if isinstance(layout, Layout) and _by_name.get(layout.name) == layout else None


def layout_names() -> tuple[str, ...]:
    """The names of all registered layouts."""
    return tuple(_by_name)


def version_of(layout: Layout) -> str:
    """A digest of the sources of a layout from another package, for compiled graphs on disk; "" for built-in layouts,
    whose sources the registry's version covers.
    """
    return _versions.get(layout.name, "")
