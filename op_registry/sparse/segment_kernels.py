"""Sums and extrema of long rows that lie one after another, a vector at a time.

torch reduces segments element by element, each addition waiting for the one before. Here the values are looked at in
chunks of one width: the chunks that lie within one row are added as vectors, and what a row has of the chunks that it
begins and ends in is taken out of them. Where that is, depends on the pattern alone, and is remembered with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from op_registry.records.fill import fill_bits, widened
from op_registry.records.validity import as_int8

aten = torch.ops.aten

# Rows of fewer elements on average are reduced one by one: most of what they have lies in chunks shared with others.
LONG = 64
WIDTH = {"sum": 16, "amax": 32, "amin": 32}


class RowChunks:
    """How rows that end at `ends` (rows + 1,) lie in chunks of `width` values.

    inner   the chunks that lie within one row, by row; within  where those of each row begin and end among them
    edges   for each row the chunk that it begins in, then for each the one that it ends in
    theirs  (2 · rows, width): which elements of these are the row's, as `filling.widened` has it for `dtype`
    rest    behind the last whole chunk: the row of each element
    """

    def __init__(self, ends: Tensor, stored: int, width: int, dtype: torch.dtype) -> None:
        self.width, self.whole = width, stored // width
        ends = ends.to(torch.int64)
        begin, end = ends[:-1], ends[1:]
        self.rows = begin.shape[0]
        first = (begin + width - 1) // width
        number = (end // width - first).clamp(min=0)
        self.within = torch.cat([number.new_zeros(1), number.cumsum(0)])
        behind = torch.repeat_interleave(first - self.within[:-1], number)
        self.inner = torch.arange(behind.shape[0], device=ends.device) + behind
        lane = torch.arange(width, device=ends.device)
        # A row that begins and ends within one chunk is counted where it begins; one that begins with a chunk, inside
        # or where it ends.
        begins, ends_in = begin // width, end // width
        head = begins.unsqueeze(1) * width + lane
        tail = ends_in.unsqueeze(1) * width + lane
        apart = (begin % width != 0).unsqueeze(1)
        own_tail = (begins != ends_in).unsqueeze(1) | ~apart
        at_head = apart & (head >= begin.unsqueeze(1)) & (head < end.unsqueeze(1))
        at_tail = own_tail & (tail >= begin.unsqueeze(1)) & (tail < end.unsqueeze(1))
        last = self.whole - 1
        there = torch.cat([at_head & (begins <= last).unsqueeze(1), at_tail & (ends_in <= last).unsqueeze(1)])
        self.theirs = widened(as_int8(there), dtype)
        self.edges = torch.cat([begins, ends_in]).clamp(max=last)
        rest = torch.arange(self.whole * width, stored, device=ends.device)
        self.rest = torch.searchsorted(ends, rest, right=True) - 1

    def reduced(self, values: Tensor, word: str) -> Tensor:
        """(rows,): "sum", "amax" or "amin" of each; the identity for a row that has nothing."""
        table = values[: self.whole * self.width].view(self.whole, self.width)
        identity = IDENTITY[word]
        edges = fill_bits(table.index_select(0, self.edges), self.theirs, identity)
        head, tail = edges.view(2, self.rows, self.width).unbind(0)
        left = values[self.whole * self.width :]
        if word == "sum":
            # torch's sum of embeddings adds whole rows of a table.
            inner = aten._embedding_bag_forward_only(table, self.inner, self.within, False, 0, False, None, True)[0]
            return (inner + head + tail).sum(1).index_add(0, self.rest, left)
        of_chunks = getattr(table, word)(1).index_select(0, self.inner)
        inner = torch.segment_reduce(of_chunks, word[1:], offsets=self.within, axis=0, unsafe=True, initial=identity)
        greater: Any = torch.maximum if word == "amax" else torch.minimum
        result = greater(inner, getattr(greater(head, tail), word)(1))
        return result.scatter_reduce(0, self.rest, left, word) if left.shape[0] else result


IDENTITY: dict[str, float] = {"sum": 0, "amax": -math.inf, "amin": math.inf}


def pays(stored: int, rows: int, values: Tensor) -> bool:
    """Whether rows are long enough, and their values such that torch's kernels take them."""
    return stored >= max(LONG * rows, 2**14) and values.dtype in (torch.float32, torch.float64) and values.is_cpu
