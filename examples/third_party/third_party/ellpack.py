"""ELLPACK, a storage for masked tensors that neither torch nor masked_dispatch has. Importing it registers it.

Every row stores the same number of elements, its *width*, at ascending distinct columns. A row with fewer valid
elements stores invalid ones beside them. So one index tensor is enough: rows need not say where they begin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from op_registry.authoring import (
    CSR,
    Coordinates,
    Layout,
    MaskedSemanticsError,
    being_traced,
    ravel,
    register_layout,
    unravel,
)

Pieces = tuple[Tensor, ...]


@dataclass(frozen=True)
class Ellpack(Layout):
    """One piece: the columns of (rows · width,) elements, row by row. Batches are one long list of rows."""

    name = "ellpack"
    min_dims = 2
    # What lists the same elements without invalid ones to fill the rows.
    exact_sibling = CSR

    def coordinates(self, pieces: Pieces, sizes: Sequence[int]) -> Coordinates:
        """The row is known by the number of elements before."""
        (columns,) = pieces
        row = torch.arange(columns.shape[0], device=columns.device) // max(width(pieces, sizes), 1)
        return (*unravel(row, sizes[:-1]), columns)

    def ends(self, pieces: Pieces, sizes: Sequence[int]) -> Tensor:
        """Rows lie one after another, which is all that sums and extrema of rows want to know."""
        return torch.arange(math.prod(sizes[:-1]) + 1, device=pieces[0].device) * width(pieces, sizes)

    def cover(self, coordinates: Coordinates, sizes: Sequence[int], block: object) -> tuple[Pieces, Tensor]:
        """Rows as wide as the fullest one. Of the columns that a row does not need, the first ones fill it.

        Then a slot that is filled has its own number as column: before it are as many elements as there are columns.
        """
        rows, row = math.prod(sizes[:-1]), ravel(coordinates[:-1], sizes[:-1])
        if being_traced(row):
            raise MaskedSemanticsError("how many elements the fullest row of ELLPACK has is not known while compiling")
        counts = row.new_zeros(rows).scatter_add(0, row, torch.ones_like(row))
        wide = int(counts.max()) if rows else 0
        order = ravel(coordinates, sizes).argsort()
        row, column = row[order], coordinates[-1][order]
        rank = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
        fillers_before = torch.minimum(column - rank, wide - counts[row])
        slot = row * wide + rank + fillers_before
        columns = torch.arange(wide, device=row.device).repeat(rows).index_copy(0, slot, column)
        return (columns,), torch.empty_like(slot).index_copy(0, order, slot)

    def problem_of_shapes(self, pieces: Pieces, sizes: Sequence[int]) -> str | None:
        """What else a file may have wrong is seen by the layout-independent checks."""
        rows, stored = math.prod(sizes[:-1]), pieces[0].shape[0]
        return None if stored == width(pieces, sizes) * rows else f"its {rows} rows store {stored} elements"


def width(pieces: Pieces, sizes: Sequence[int]) -> int:
    """How many elements each row stores."""
    rows = math.prod(sizes[:-1])
    return pieces[0].shape[0] // rows if rows else 0


ELLPACK = register_layout(Ellpack())
