"""Segments: the stored elements of each slice of a sparse record.

Reductions need the sum and the extremum of each slice, and per-slice values broadcast back to the elements. All of
these take one pass over the stored elements and do not depend on the length of the longest slice, so that one graph
serves all inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense
from op_registry.records.dtypes import SIGNED, accumulation_dtype
from op_registry.records.own_function import OwnFunction
from op_registry.records.slices import Extremum
from op_registry.records.tracing import being_traced, computed_at_once
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.coordinates import Coordinates, unique_keys, unravel
from op_registry.sparse.pattern import Pattern
from op_registry.sparse.record import NotLowered, Sparse
from op_registry.sparse.segment_kernels import IDENTITY, WIDTH, Reduction, RowChunks, is_worthwhile


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
            return _Sum.apply(t, self)
        return t.new_zeros((self.slices, *t.shape[1:])).index_add(0, self.segment_ids, t)

    def sum_contiguous(self, t: Tensor) -> Tensor:
        """Σ over slices that are contiguous in storage, (stored,) → (slices,); not differentiable."""
        return self._reduce_contiguous(t, "sum")

    def _reduce_contiguous(self, t: Tensor, reduction: Reduction) -> Tensor:
        if t.shape[0] == 0:
            return t.new_zeros(self.slices)
        if is_worthwhile(t.shape[0], self.slices, t):
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
