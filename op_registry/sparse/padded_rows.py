"""Padded rows: the stored elements of each slice of a sparse record side by side, for rules that run slice by slice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.sparse.coordinates import ravel
from op_registry.sparse.record import NotLowered, Sparse, placed
from op_registry.sparse.segments import Segments


class PaddedRows:
    """The stored elements of each slice as one row of a dense record of shape (slices, width, *dense).

    A slice runs over the sparse dimensions `along`; there is one for each combination of indices in the other sparse
    dimensions. A row keeps the order of its elements and is padded with invalid ones. `at_least` is the smallest width:
    with the default of 1, a slice without stored elements is a row without valid ones rather than an empty row.

    With `occupied`, slices without stored elements have no row if most have none.
    """

    def __init__(self, x: Sparse, along: Sequence[int], at_least: int = 1, *, occupied: bool = False) -> None:
        pattern = x.pattern
        if being_traced(pattern.pieces[0]):
            raise NotLowered("the length of the longest slice is not known while tracing")
        self.over = over = Segments(x, along, occupied=occupied)
        self.slices, row = over.slices, over.segment_ids
        position_in_slice = pattern.raveled(along)
        extents = [self.slices, math.prod(pattern.sizes[d] for d in along)]
        order = ravel([row, position_in_slice], extents).argsort()
        sorted_row = row[order]
        counts = over.stored_counts
        starts = counts.cumsum(0) - counts
        column = torch.arange(pattern.stored, device=x.device) - starts[sorted_row]
        self.width = max(int(counts.max()) if self.slices else 0, at_least)
        # Where each stored element lies in the flattened rows.
        self.slots = torch.empty_like(row).index_copy(0, order, sorted_row * self.width + column)
        self._position_in_slice = position_in_slice

    def pad(self, flat: Dense) -> Dense:
        """Values in storage order, (stored, *dense), as padded rows."""
        rows = placed(flat, self.slots, self.slices * self.width)
        return rows.map(lambda t: t.reshape(self.slices, self.width, *flat.shape[1:]))

    def unpad(self, rows: Dense) -> Dense:
        """Values of padded rows in storage order."""
        return rows.map(lambda t: t.reshape(-1, *t.shape[2:])[self.slots])

    def positions_in_slice(self) -> Tensor:
        """The position of each element within the original slice, (slices, width); 0 in the padding."""
        positions = self._position_in_slice
        flat = torch.zeros(self.slices * self.width, dtype=torch.int64, device=positions.device)
        return flat.index_copy(0, self.slots, positions).reshape(self.slices, self.width)
