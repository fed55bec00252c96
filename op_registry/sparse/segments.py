"""Segments: the stored elements of each slice of a sparse record.

Reductions need the sum and the extremum of each slice, and per-slice values broadcast back to the elements. All of
these take one pass over the stored elements and do not depend on the length of the longest slice, so that one graph
serves all inputs.

Rules that run slice by slice get *padded rows* (:class:`PaddedRows`): the stored elements of each slice side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.arguments import SIGNED, accumulation_dtype
from op_registry.records.dense import Dense
from op_registry.records.fill import OwnFunction, fill_bits, widened
from op_registry.records.slices import Extremum
from op_registry.records.tracing import being_traced, computed_at_once, under_transform
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.convert import placed
from op_registry.sparse.coordinates import Coordinates, ravel, unique_keys, unravel
from op_registry.sparse.record import NotLowered, Pattern, Sparse


def few_of(slices: int, pattern: Pattern) -> bool:
    """Whether so few elements are stored that most slices have none; False while their number is unknown."""
    return not being_traced(pattern.pieces[0]) and 0 < pattern.stored < slices


class Segments:
    """The slices of a sparse record, each over the sparse dimensions `along` and the dense dimensions `inside`.

    slices  the number of slices
    sizes   sizes of the remaining sparse dimensions

    With `occupied`, only slices that store something are counted, in order, so that the number of slices is bounded by
    that of the elements: for results that belong to elements, of which an empty slice has none.

    Methods take values in storage order, (stored, *dense), and return one per slice, (slices, *dense), in which the
    dense dimensions `inside` have size 1.
    """

    def __init__(self, x: Sparse, along: Sequence[int], inside: Sequence[int] = (), *, occupied: bool = False) -> None:
        self.pattern = x.pattern
        self.along = tuple(along)
        self.inside = tuple(inside)  # as dimensions of (stored, *dense)
        self.remaining = tuple(d for d in range(self.pattern.ndim) if d not in along)
        self.sizes = tuple(self.pattern.sizes[d] for d in self.remaining)
        self.slices = math.prod(self.sizes)
        self.occupied = occupied and few_of(self.slices, self.pattern)
        if self.occupied:
            # The slices that store something, ascending, and the position among them of that of every stored element.
            self._occupied: tuple[Tensor, Tensor] = self.pattern.cached(
                ("occupied_slices", self.along), lambda: unique_keys(self.pattern.raveled(self.remaining), self.slices)
            )
            self.slices = self._occupied[0].shape[0]

    def sum(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Σ over each slice, in the dtype of `t` or in another one."""
        t = t if dtype is None else t.to(dtype)
        t = t.sum(self.inside, keepdim=True, dtype=t.dtype) if self.inside else t
        if not self.remaining:
            return t.sum(0, keepdim=True, dtype=t.dtype)
        if self.ends is not None and t.ndim == 1 and t.is_floating_point() and computed_at_once(t):
            derived = (t.requires_grad and torch.is_grad_enabled()) or under_transform()
            return _Sum.apply(t, self) if derived else self.sum_contiguous(t)
        return t.new_zeros((self.slices, *t.shape[1:])).index_add(0, self.segment_ids, t)

    def sum_contiguous(self, t: Tensor) -> Tensor:
        """Σ over slices that are contiguous in storage, (stored,) → (slices,); not differentiable."""
        return self._reduce_contiguous(t, "sum")

    def _reduce_contiguous(self, t: Tensor, reduction: Reduction) -> Tensor:
        if t.shape[0] == 0:
            return t.new_zeros(self.slices)
        if is_worthwhile(t, self.slices, reduction):
            width = WIDTH[reduction]
            ends = self.ends
            assert ends is not None
            chunks = self.pattern.cached(
                ("chunks", self.along, width, t.dtype), lambda: RowChunks(ends, t.shape[0], width, t.dtype)
            )
            return chunks.reduce(t.contiguous(), reduction)
        torch_name = reduction if reduction == "sum" else reduction[1:]
        initial = IDENTITY[reduction]
        return torch.segment_reduce(t, torch_name, offsets=self.ends, axis=0, unsafe=True, initial=initial)

    def extremum(self, t: Tensor, reduction: Extremum) -> Tensor:
        """The maximum or minimum of each slice; not differentiable, and arbitrary for one without stored elements."""
        if t.dtype.is_complex or t.dtype in (torch.bool, *SIGNED):
            raise NotLowered(f"torch has no segment extremum of {t.dtype}")
        t = forward_ad.unpack_dual(t.detach()).primal
        if self.inside:
            t = torch.amax(t, self.inside, True) if reduction == "amax" else torch.amin(t, self.inside, True)
        if not self.remaining and not being_traced(t):
            return getattr(torch, reduction)(t, 0, True) if t.shape[0] else t.new_zeros((1, *t.shape[1:]))
        if self.ends is not None and t.ndim == 1 and t.is_floating_point() and computed_at_once(t):
            return self._reduce_contiguous(t, reduction)
        segment_ids = self.segment_ids.reshape(-1, *[1] * (t.ndim - 1)).expand(t.shape)
        empty = t.new_zeros((self.slices, *t.shape[1:]))
        return empty.scatter_reduce(0, segment_ids, t, reduction, include_self=False)

    def broadcast_to_elements(self, per_slice: Tensor) -> Tensor:
        """The value of its slice for every stored element; the dense dimensions `inside` still have size 1."""
        return per_slice.index_select(0, self.segment_ids) if self.remaining else per_slice

    def count(self, x: Dense) -> Tensor:
        """The number of valid values in each slice, int64."""
        validity = x.full_validity
        if validity is not None:
            return self.sum(as_int8(validity).to(torch.int32)).to(torch.int64)
        inner_numel = math.prod(x.shape[d] for d in self.inside)
        shape = (-1, *(1 if d in self.inside else x.shape[d] for d in range(1, x.ndim)))
        per_slice = (self.stored_counts * inner_numel).reshape(-1, *[1] * (x.ndim - 1))
        return per_slice.expand(self.slices, *shape[1:])

    def exists(self, x: Dense) -> Tensor:
        """Validity of a reduction: where a slice has a valid element."""
        if x.validity is not None or not known_to_hold(math.prod(x.shape[d] for d in self.inside) != 0):
            return as_int8(self.count(x) > 0)
        key = ("nonempty", self.along, self.occupied)
        nonempty: Tensor = self.pattern.cached(key, lambda: as_int8(self.stored_counts > 0))
        shape = [1 if d in self.inside else x.shape[d] for d in range(1, x.ndim)]
        return nonempty.reshape(-1, *[1] * len(shape)).expand(-1, *shape) if shape else nonempty

    @property
    def segment_ids(self) -> Tensor:
        """The slice of every stored element, int64."""
        if self.occupied:
            return self._occupied[1]
        return self.pattern.cached(("segment_ids", self.along), lambda: self.pattern.raveled(self.remaining))

    def slice_of(self, numbers: Tensor) -> Coordinates:
        """The coordinates of slices, given by number, in the remaining sparse dimensions."""
        return unravel(self._occupied[0][numbers] if self.occupied else numbers, self.sizes)

    @property
    def stored_counts(self) -> Tensor:
        """The number of stored elements of each slice, int64."""
        return self.pattern.cached(("stored_counts", self.along, self.occupied), self._stored_counts)

    @property
    def ends(self) -> Tensor | None:
        """Where slices start and end, (slices + 1,), if they are contiguous in storage; else None."""
        pattern, inner_dim = self.pattern, self.pattern.layout.inner_dim
        in_order = not self.occupied and (inner_dim == -1 or pattern.ndim == 2)
        return pattern.ends() if self.along == (pattern.ndim + inner_dim,) and in_order else None

    def _stored_counts(self) -> Tensor:
        if self.ends is not None:
            return self.ends.diff().to(torch.int64)
        segment_ids = self.segment_ids
        zeros = torch.zeros(self.slices, dtype=torch.int64, device=segment_ids.device)
        return zeros.scatter_add(0, segment_ids, torch.ones_like(segment_ids))


class _Context(Protocol):
    """What `_Sum` saves for its derivatives."""

    segments: Segments


class _Sum(OwnFunction):
    """Σ over slices that are contiguous in storage.

    torch's backward of segment_reduce has no second derivative, and a scatter takes four times as long. The backward
    here is `broadcast_to_elements`, whose derivative is a sum again.
    """

    @staticmethod
    def forward(ctx: _Context, t: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments.sum_contiguous(t)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.broadcast_to_elements(grad), None

    @staticmethod
    def jvp(ctx: _Context, tangent: Tensor, _: None) -> Tensor:
        return ctx.segments.sum(tangent)


def segment_exponentials(over: Segments, x: Dense) -> tuple[Dense, Tensor, Tensor]:
    """In accumulation dtype: `x`, the maximum of each slice, and that maximum broadcast to the elements."""
    x = x.like(x.data.to(accumulation_dtype(x.dtype)))
    peak = over.extremum(Dense(x.data.detach(), x.validity).filled(-math.inf), "amax")
    # 0 in place of -inf for slices without a valid element: anomaly detection inspects masked values, too.
    peak = torch.where(as_bool(over.exists(x)), peak, 0)
    return x, peak, over.broadcast_to_elements(peak)


# ------------------------------------------------------------------------------------------------------------ long rows
# torch's segment_reduce adds elements one by one, each addition waiting for the previous one. Here the values are
# split into chunks of a fixed width: chunks inside one row are added as vectors, and the elements that a row has in
# the chunks at its two edges are selected by a mask. The chunking depends on the pattern alone and is cached with it.

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


def is_worthwhile(values: Tensor, rows: int, reduction: Reduction) -> bool:
    """Whether rows are long enough for chunks, and torch vectorises the kernels used here for the values' dtype."""
    fast = (torch.float32,) if reduction == "sum" else (torch.float32, torch.float64)
    return values.shape[0] >= max(LONG * rows, 2**14) and values.dtype in fast and values.is_cpu


# ---------------------------------------------------------------------------------------------------------- padded rows


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
