"""Lines: the stored elements of each slice of a sparse record side by side, for rules that work slice by slice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.records.broadcast import full_mask
from op_registry.records.dense import Dense
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8
from op_registry.sparse.coordinates import ravel
from op_registry.sparse.record import NotLowered, Sparse


class PaddedRows:
    """The stored elements of each slice side by side: a dense record of shape (slices, longest, *dense).

    A slice runs over the sparse dimensions `along`, for each place in the other sparse dimensions. Its elements keep
    their order; behind the last one, elements are invalid. There is room for one at least, so that a slice of which
    nothing is stored is one of which nothing is valid, and not an empty one.
    """

    def __init__(self, x: Sparse, along: Sequence[int], at_least: int = 1) -> None:
        pattern = x.pattern
        if being_traced(pattern.pieces[0]):
            raise NotLowered("how long the longest slice is, is not known while tracing")
        places = pattern.places()
        self.kept = tuple(d for d in range(pattern.ndim) if d not in along)
        self.sizes = tuple(pattern.sizes[d] for d in self.kept)
        self.slices = math.prod(self.sizes)
        stored = pattern.stored
        if self.kept:
            line = ravel([places[d] for d in self.kept], self.sizes)
        else:
            line = torch.zeros(stored, dtype=torch.int64, device=x.device)
        key = ravel([places[d] for d in along], [pattern.sizes[d] for d in along])
        order = ravel([line, key], [self.slices, math.prod(pattern.sizes[d] for d in along)]).argsort()
        sorted_line = line[order]
        counts = torch.zeros(self.slices, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, line, torch.ones_like(line))
        starts = counts.cumsum(0) - counts
        place_in_line = torch.arange(stored, device=x.device) - starts[sorted_line]
        self.width = max(int(counts.max()) if self.slices else 0, at_least)
        self.slots = torch.empty_like(line).index_copy(0, order, sorted_line * self.width + place_in_line)
        self._key = key

    def spread(self, flat: Dense) -> Dense:
        """Values given one after another, in lines."""
        shape = (self.slices * self.width, *flat.shape[1:])
        data = flat.data.new_zeros(shape).index_copy(0, self.slots, flat.data)
        empty = torch.zeros(shape, dtype=torch.int8, device=flat.device)
        validity = empty.index_copy(0, self.slots, as_int8(full_mask(flat)))
        return Dense(data, validity).map(lambda t: t.reshape(self.slices, self.width, *flat.shape[1:]))

    def collect(self, lines: Dense) -> Dense:
        """Values in lines, one after another."""
        return lines.map(lambda t: t.reshape(-1, *t.shape[2:])[self.slots])

    def coordinates(self) -> Tensor:
        """The position of each element in its whole slice, (slices, longest)."""
        flat = torch.zeros(self.slices * self.width, dtype=torch.int64, device=self._key.device)
        return flat.index_copy(0, self.slots, self._key).reshape(self.slices, self.width)
