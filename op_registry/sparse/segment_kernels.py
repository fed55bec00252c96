"""Vectorized sums and extrema of long rows that are contiguous in memory.

torch's segment_reduce adds elements one by one, each addition waiting for the previous one. Here the values are split
into chunks of a fixed width: chunks inside one row are added as vectors, and the elements that a row has in the chunks
at its two edges are selected by a mask. The chunking depends on the pattern alone and is cached with it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from op_registry.records.fill import fill_bits, widened
from op_registry.records.validity import as_int8

aten = torch.ops.aten

Reduction = Literal["sum", "amax", "amin"]

# Shorter rows, on average, are reduced directly: most of their elements are in edge chunks.
LONG = 64
WIDTH: dict[Reduction, int] = {"sum": 16, "amax": 32, "amin": 32}
IDENTITY: dict[Reduction, float] = {"sum": 0, "amax": -math.inf, "amin": math.inf}


class RowChunks:
    """How rows with boundaries `ends` (rows + 1,) divide into chunks of `width` values.

    inner         the chunks that lie inside one row, by row
    inner_ends    where those of each row start and end in `inner`, (rows + 1,)
    edges         (2 · rows,): the chunk in which each row starts, then the one in which each ends
    edge_mask     (2 · rows, width): which elements of these belong to the row, as `fill.widened` returns it for `dtype`
    remainder     the row of each element behind the last whole chunk
    """

    def __init__(self, ends: Tensor, stored: int, width: int, dtype: torch.dtype) -> None:
        self.width, self.chunks = width, stored // width
        ends = ends.to(torch.int64)
        begin, end = ends[:-1], ends[1:]
        self.rows = begin.shape[0]
        first = (begin + width - 1) // width
        number = (end // width - first).clamp(min=0)
        self.inner_ends = torch.cat([number.new_zeros(1), number.cumsum(0)])
        shift = torch.repeat_interleave(first - self.inner_ends[:-1], number)
        self.inner = torch.arange(shift.shape[0], device=ends.device) + shift
        lane = torch.arange(width, device=ends.device)
        # A row within one chunk is counted at its head. A row that starts at a chunk boundary has no head: its elements
        # are in inner chunks or in its tail.
        head_chunk, tail_chunk = begin // width, end // width
        head = head_chunk.unsqueeze(1) * width + lane
        tail = tail_chunk.unsqueeze(1) * width + lane
        has_head = (begin % width != 0).unsqueeze(1)
        has_tail = (head_chunk != tail_chunk).unsqueeze(1) | ~has_head
        in_head = has_head & (head >= begin.unsqueeze(1)) & (head < end.unsqueeze(1))
        in_tail = has_tail & (tail >= begin.unsqueeze(1)) & (tail < end.unsqueeze(1))
        last = self.chunks - 1
        in_head &= (head_chunk <= last).unsqueeze(1)
        in_tail &= (tail_chunk <= last).unsqueeze(1)
        self.edge_mask = widened(as_int8(torch.cat([in_head, in_tail])), dtype)
        self.edges = torch.cat([head_chunk, tail_chunk]).clamp(max=last)
        rest = torch.arange(self.chunks * width, stored, device=ends.device)
        self.remainder = torch.searchsorted(ends, rest, right=True) - 1

    def reduce(self, values: Tensor, reduction: Reduction) -> Tensor:
        """(rows,): the sum or extremum of each row; the reduction's identity for an empty row."""
        table = values[: self.chunks * self.width].view(self.chunks, self.width)
        identity = IDENTITY[reduction]
        edges = fill_bits(table.index_select(0, self.edges), self.edge_mask, identity)
        head, tail = edges.view(2, self.rows, self.width).unbind(0)
        rest = values[self.chunks * self.width :]
        if reduction == "sum":
            # torch's embedding_bag adds whole rows of a table.
            bags = aten._embedding_bag_forward_only(table, self.inner, self.inner_ends, False, 0, False, None, True)
            return (bags[0] + head + tail).sum(1).index_add(0, self.remainder, rest)
        of_chunks = getattr(table, reduction)(1).index_select(0, self.inner)
        torch_name = reduction[1:]
        inner = torch.segment_reduce(
            of_chunks, torch_name, offsets=self.inner_ends, axis=0, unsafe=True, initial=identity
        )
        combine = torch.maximum if reduction == "amax" else torch.minimum
        result = combine(inner, getattr(combine(head, tail), reduction)(1))
        return result.scatter_reduce(0, self.remainder, rest, reduction) if rest.shape[0] else result


def is_worthwhile(stored: int, rows: int, values: Tensor) -> bool:
    """Whether rows are long enough for chunks, and the kernels used here support the values."""
    return stored >= max(LONG * rows, 2**14) and values.dtype in (torch.float32, torch.float64) and values.is_cpu
