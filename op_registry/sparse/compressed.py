"""Compressed layouts: CSR and CSC, their block forms BSR and BSC, and packed rows."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from op_registry.older_torch import with_contiguous_strides
from op_registry.sparse import convert
from op_registry.sparse.coordinates import Coordinates, ravel, unique_keys, unravel
from op_registry.sparse.layout import Block, Layout, Pieces, T, grid_of
from op_registry.sparse.well_formed import problem_of_compressed, rows_ascend


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
