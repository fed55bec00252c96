"""Segments: the stored elements of each slice of a sparse record, one after another as they lie.

What reductions need of them is few words: the sum and the extremum of each slice, and back, a number of each slice for
every one of its elements. Nothing depends on how long the longest slice is, so that it is the same graph for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from op_registry.records.dense import Dense
from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import being_traced, computed_at_once
from op_registry.records.validity import as_bool, as_int8
from op_registry.sparse.coordinates import ravel
from op_registry.sparse.record import Sparse
from op_registry.sparse.segment_kernels import IDENTITY, WIDTH, RowChunks, pays


class Segments:
    """The slices of a sparse record that run over the sparse dimensions `along`, and over the dense ones `inside`.

    slices  how many there are
    sizes   of the sparse dimensions that are left

    Its words take values as they are stored one after another, (stored, *dense), and give one for each slice,
    (slices, *dense), where the dense dimensions that are `inside` are 1.
    """

    def __init__(self, x: Sparse, along: Sequence[int], inside: Sequence[int] = ()) -> None:
        self.pattern = x.pattern
        self.along = tuple(along)
        self.inside = tuple(inside)  # as dimensions of (stored, *dense)
        self.kept = tuple(d for d in range(self.pattern.ndim) if d not in along)
        self.sizes = tuple(self.pattern.sizes[d] for d in self.kept)
        self.slices = math.prod(self.sizes)

    def sum(self, t: Tensor) -> Tensor:
        """Σ over each slice, in the dtype of `t`."""
        t = t.sum(self.inside, keepdim=True, dtype=t.dtype) if self.inside else t
        if not self.kept:
            return t.sum(0, keepdim=True, dtype=t.dtype)
        if self.ends is not None and t.ndim == 1 and t.is_floating_point() and computed_at_once(t):
            total: Tensor = _Sum.apply(t, self)
            return total
        return t.new_zeros((self.slices, *t.shape[1:])).index_add(0, self.line, t)

    def sum_in_order(self, t: Tensor) -> Tensor:
        """Σ over slices that lie one after another, (stored,) → (slices,), without derivative."""
        return self._in_order(t, "sum")

    def _in_order(self, t: Tensor, word: str) -> Tensor:
        if t.shape[0] == 0:
            return t.new_zeros(self.slices)
        if pays(t.shape[0], self.slices, t):
            width = WIDTH[word]
            ends = self.ends
            assert ends is not None
            chunks = self.pattern.remembered(
                ("chunks", self.along, width, t.dtype), lambda: RowChunks(ends, t.shape[0], width, t.dtype)
            )
            reduced: Tensor = chunks.reduced(t.contiguous(), word)
            return reduced
        reduction = word if word == "sum" else word[1:]
        return torch.segment_reduce(t, reduction, offsets=self.ends, axis=0, unsafe=True, initial=IDENTITY[word])

    def extremum(self, t: Tensor, word: str) -> Tensor:
        """The greatest ("amax") or least ("amin") of each slice, without derivative; anything where there is none."""
        t = forward_ad.unpack_dual(t.detach()).primal
        if self.inside:
            t = torch.amax(t, self.inside, True) if word == "amax" else torch.amin(t, self.inside, True)
        if not self.kept and not being_traced(t):
            return getattr(torch, word)(t, 0, True) if t.shape[0] else t.new_zeros((1, *t.shape[1:]))
        if self.ends is not None and t.ndim == 1 and t.is_floating_point() and computed_at_once(t):
            return self._in_order(t, word)
        line = self.line.reshape(-1, *[1] * (t.ndim - 1)).expand(t.shape)
        empty = t.new_zeros((self.slices, *t.shape[1:]))
        return empty.scatter_reduce(0, line, t, word, include_self=False)

    def spread(self, each: Tensor) -> Tensor:
        """For every stored element the number of its slice; the dense dimensions that are `inside` stay 1."""
        return each.index_select(0, self.line) if self.kept else each

    def count(self, x: Dense) -> Tensor:
        """How many of the values `x` are valid in each slice, int64."""
        validity = x.full_validity
        if validity is not None:
            whole = as_int8(validity).to(torch.int32)
            return self.sum(whole).to(torch.int64)
        each = math.prod(x.shape[d] for d in self.inside)
        shape = (-1, *(1 if d in self.inside else x.shape[d] for d in range(1, x.ndim)))
        return (self.stored * each).reshape(-1, *[1] * (x.ndim - 1)).expand(self.slices, *shape[1:])

    @property
    def line(self) -> Tensor:
        """The slice of every stored element, int64."""
        return self.pattern.remembered(("line", self.along), self._line)

    @property
    def stored(self) -> Tensor:
        """How many elements are stored of each slice, int64."""
        return self.pattern.remembered(("stored", self.along), self._stored)

    @property
    def ends(self) -> Tensor | None:
        """Where slices begin and end, if they lie one after another: (slices + 1,)."""
        pattern, line_dim = self.pattern, self.pattern.layout.line_dim
        in_order = line_dim == -1 or pattern.ndim == 2
        return pattern.ends() if self.along == (pattern.ndim + line_dim,) and in_order else None

    def _line(self) -> Tensor:
        places = self.pattern.places()
        if not self.kept:
            return torch.zeros_like(places[0])
        return ravel([places[d] for d in self.kept], self.sizes)

    def _stored(self) -> Tensor:
        if self.ends is not None:
            return self.ends.diff().to(torch.int64)
        line = self.line
        return torch.zeros(self.slices, dtype=torch.int64, device=line.device).scatter_add(
            0, line, torch.ones_like(line)
        )


class _Sum(torch.autograd.Function):
    """Σ over slices that lie one after another.

    torch's own formula for it has no second derivative, and a scatter takes four times as long. The derivative is
    `spread`, whose own is a sum again.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return segments.sum_in_order(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.segments.spread(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return ctx.segments.sum(tangent)


def segment_exponentials(over: Segments, x: Dense) -> tuple[Dense, Tensor, Tensor]:
    """In accumulation dtype: each element less the greatest of its slice, that, and the sum of the exponentials."""
    x = x.like(x.data.to(accumulation_dtype(x.dtype)))
    peak = over.extremum(Dense(x.data.detach(), x.validity).filled(-math.inf), "amax")
    # A slice of which nothing is valid, though something is stored: finite inside, for anomaly detection.
    peak = torch.where(as_bool(segment_validity(over, x)), peak, 0)
    return x, peak, over.spread(peak)


def segment_validity(over: Segments, x: Dense) -> Tensor:
    """Validity of a reduction: where a slice has a valid element."""
    if x.validity is not None or x.ndim > 1:
        return as_int8(over.count(x) > 0)
    some: Tensor = over.pattern.remembered(("some", over.along), lambda: as_int8(over.stored > 0))
    return some
