"""Sorting: sort, topk, kthvalue, median, mode, searchsorted; argsort and msort decompose into sort.

Law: the n valid elements come first, sorted, in ascending as in descending order; the first n positions are valid.
Operators that pick one element (kthvalue, median, mode) are reductions: they pick a valid element, and its index.

One stable sort of data with arbitrary fills, then a stable move of the valid elements to the front: no fill value
sorts behind valid infinities, NaN and extreme integers. (Where one sorts behind all that is valid, the sort is enough.)
Values are gathered from the input, so that gradients go where the indices point.

Law of equal elements: which of their indices sort, topk, kthvalue and mode give is open in torch, and depends on the
kernel. Where every element is valid, even if a mask is stored, torch's own kernel chooses. In a partly valid input, in
a graph, and on a device where reading a mask would wait, equal elements keep the order of the input. No more is
promised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ELEMENTWISE,
    REDUCTION,
    SORTING,
    Dense,
    Equation,
    MaskedSemanticsError,
    Permuted,
    Slices,
    Sparse,
    as_int8,
    gradients_may_flow,
    known_all_valid,
    masked_rule,
    masked_slices,
    never,
    packet_name,
    results_like,
)
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.layout import concatenated
from op_registry.records.slices import (
    DenseSlices,
    Order,
    arange_along,
    extremum,
    flattened,
    reduced_dims,
    sort_valid,
    squeeze_reduced,
)
from op_registry.records.tracing import computed_at_once, may_be_read
from op_registry.rule import Run

aten = torch.ops.aten
# The elements that are put in order at a time where few of them are asked for.
_AT_ONCE = 1 << 18


def ordered_by_torch(rule: Run) -> Run:
    """The rule of an operator that names one of equal elements: torch's own choice where all are valid."""

    @functools.wraps(rule)
    def run(op: OpOverload, x: Dense, *args: Any, **kwargs: Any) -> Any:
        if may_be_read(x.data) and known_all_valid(x):
            return results_like(op(x.data, *args, **kwargs), None)
        return rule(op, x, *args, **kwargs)

    return run


def refuse_dtype(op: OpOverload, x: Dense, *args: Any) -> None:
    """Raise torch's own error where it has no kernel for bool or complex numbers, which a sort may take."""
    if x.dtype is torch.bool or x.dtype.is_complex:
        op(x.data, *args)


@masked_slices(aten.sort, category=SORTING, dims=Slices("front", positions=(1,)))
@ordered_by_torch
def sort(
    op: OpOverload, x: Dense, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Dense, Dense]:
    """Stable where a slice is partly valid, whether requested or not."""
    if x.ndim == 0:
        values, index = aten.sort(x.data, dim, descending)
        return x.like(values), x.like(index)
    order = sort_valid(x, dim, descending)
    validity = as_int8(arange_along(x.shape[dim], dim, x.data) < order.count)
    return Dense(order.values, validity), Dense(order.index, validity)


@masked_slices(aten.topk, category=SORTING, dims=Slices("front", positions=(1,), number="k"))
@ordered_by_torch
def topk(
    op: OpOverload, x: Dense, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Dense, Dense]:
    """The first k elements of the order."""
    if x.ndim == 0 or k < 0 or known_to_hold(k > x.shape[dim]):
        values, index = op(x.data, k, dim, largest, sorted)  # raises torch's error
        return Dense(values, x.validity if k else None), Dense(index, x.validity if k else None)

    refuse_dtype(op, x, k, dim)

    def first(x: Dense) -> tuple[Dense, Dense]:
        order = sort_valid(x, dim, descending=largest)
        validity = as_int8(arange_along(k, dim, x.data) < order.count)
        # (Copied: a view would keep the whole order.)
        values, index = (t.narrow(dim, 0, k).clone() for t in (order.values, order.index))
        return Dense(values, validity), Dense(index, validity)

    return some_slices_at_a_time(first, x, dim)


Pick = Callable[[Dense], tuple[Dense, Dense]]


def some_slices_at_a_time(pick: Pick, x: Dense, dim: int) -> tuple[Dense, Dense]:
    """`pick`, of which each slice gives few elements: a whole order takes several times the memory of the data."""
    if not computed_at_once(x.data) or gradients_may_flow(x.data):
        return pick(x)
    if x.data.numel() // max(1, x.shape[dim]) < 2:
        return pick(x)
    across = next(d for d in range(x.ndim) if d != dim % x.ndim and x.shape[d] > 1)
    count = max(1, _AT_ONCE * x.shape[across] // x.data.numel())
    starts = range(0, x.shape[across], count)
    if len(starts) == 1:
        return pick(x)
    ends = [*starts[1:], x.shape[across]]
    parts = [pick(part_of(x, across, start, end)) for start, end in zip(starts, ends, strict=True)]
    values, indices = zip(*parts, strict=True)
    at = across if values[0].ndim == x.ndim or across < dim % x.ndim else across - 1
    return concatenated(values, at), concatenated(indices, at)


def part_of(x: Dense, dim: int, start: int, end: int) -> Dense:
    return x.map(lambda t: t.narrow(dim, start, end - start))


# --------------------------------------------------------------------------------------------- one element of the order


def element_at(x: Dense, order: Order, rank: Tensor, dim: int, keepdim: bool, exists: Tensor) -> tuple[Dense, Dense]:
    """The element at a rank of the order, and its index in the input."""
    rank = rank.clamp(min=0)
    results = (order.values.gather(dim, rank), order.index.gather(dim, rank))
    dims = reduced_dims(x, dim)
    values, index = (Dense(squeeze_reduced(dims, r, keepdim), squeeze_reduced(dims, exists, keepdim)) for r in results)
    return values, index


@masked_slices(aten.kthvalue, category=REDUCTION, dims=Slices(positions=(1,), number="k"))
@ordered_by_torch
def kthvalue(op: OpOverload, x: Dense, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Dense, Dense]:
    """Valid where there are at least k valid elements."""
    if x.ndim == 0 or k < 1 or known_to_hold(k > x.shape[dim]):
        values, index = op(x.data, k, dim, keepdim)  # raises torch's error
        return x.like(values), x.like(index)

    refuse_dtype(op, x, k, dim)

    def kth(x: Dense) -> tuple[Dense, Dense]:
        order = sort_valid(x, dim)
        rank = torch.full_like(order.count, k - 1)
        return element_at(x, order, rank, dim, keepdim, as_int8(order.count >= k))

    return some_slices_at_a_time(kth, x, dim)


# torch's kernel reads beyond its copy of a slice of stride 0.
@masked_slices(aten.median.dim, aten.nanmedian.dim, category=REDUCTION, dims=Slices(positions=(1,), own_memory=True))
def median(op: OpOverload, x: Dense, dim: int, keepdim: bool = False) -> tuple[Dense, Dense]:
    """The lower median; the first NaN if a valid element is NaN (nanmedian skips NaN)."""
    if x.ndim == 0:
        values, index = op(x.data, dim, keepdim)
        return x.like(values), x.like(index)

    refuse_dtype(op, x, dim)

    def middle(x: Dense) -> tuple[Dense, Dense]:
        order = sort_valid(x, dim)
        rank = median_rank(order, dim, ignore_nan=op is aten.nanmedian.dim)
        return element_at(x, order, rank, dim, keepdim, as_int8(order.count > 0))

    return some_slices_at_a_time(middle, x, dim)


def median_rank(order: Order, dim: int, ignore_nan: bool) -> Tensor:
    """The rank of the median in the order; NaN come last among the valid elements."""
    values = order.values.detach()
    nans = Dense(values, as_int8(values.isnan())).count(dim, keepdim=True)
    assert isinstance(nans, Tensor)
    numbers = order.count - nans
    half = (numbers - 1).div(2, rounding_mode="floor").clamp(min=0)
    return half if ignore_nan else torch.where(nans > 0, numbers, half)


@masked_slices(aten.median.default, aten.nanmedian.default, category=REDUCTION, dims=Slices())
def median_of_all(op: OpOverload, x: Dense) -> Dense:
    """The median of all elements; as in torch, the valid elements that equal it share its gradient."""
    refuse_dtype(op, x)
    flat = flattened(x)
    order = sort_valid(Dense(flat.data.detach(), flat.validity), 0)
    rank = median_rank(order, 0, ignore_nan=op is aten.nanmedian.default)
    value = order.values.gather(0, rank)
    equal = (flat.data.detach() == value) | (flat.data.detach() != flat.data.detach()) & (value != value)
    ties = flat.masked_by(as_int8(equal))
    return Dense(extremum(ties, DenseSlices((0,), keepdim=False), "amax"), x.any_valid())


@masked_slices(aten.mode, category=REDUCTION, dims=Slices(positions=(1,)))
@ordered_by_torch
def mode(op: OpOverload, x: Dense, dim: int = -1, keepdim: bool = False) -> tuple[Dense, Dense]:
    """The smallest of the most frequent values, and its last index; NaN equals nothing, not even itself."""
    if x.ndim == 0:
        values, index = op(x.data, dim, keepdim)
        return x.like(values), x.like(index)

    def most_frequent(x: Dense) -> tuple[Dense, Dense]:
        order = sort_valid(x, dim)
        size = x.shape[dim]
        values, rank = order.values.detach(), arange_along(size, dim, x.data)
        differs = values.narrow(dim, 1, size - 1) != values.narrow(dim, 0, size - 1)
        starts = torch.cat([torch.ones_like(values.narrow(dim, 0, 1), dtype=torch.bool), differs], dim)
        run_start = torch.where(starts, rank, 0).cummax(dim).values
        run_length = torch.where(rank < order.count, rank - run_start + 1, 0)
        return element_at(x, order, run_length.argmax(dim, keepdim=True), dim, keepdim, as_int8(order.count > 0))

    return some_slices_at_a_time(most_frequent, x, dim)


# ---------------------------------------------------------------------------------------------- positions in a sequence


@masked_rule(
    aten.bucketize.Tensor, aten.bucketize.Scalar, category=ELEMENTWISE, takes_op=True, dims=Equation("*,S->*", "S->")
)
def bucketize(op: OpOverload, x: Dense | float, boundaries: Dense, **options: bool) -> Dense:
    """Elementwise in the input. Refused if a boundary is invalid: the order of the boundaries is unknown then."""
    require_all_valid(op, boundaries)
    return positions_of(x, op(x.data if isinstance(x, Dense) else x, boundaries.data, **options))


NEEDS_WHOLE_SEQUENCE = never("every element is looked up in the whole sequence")
bucketize.lowering(Sparse)(NEEDS_WHOLE_SEQUENCE)
bucketize.lowering(Permuted)(NEEDS_WHOLE_SEQUENCE)


@masked_rule(
    aten.searchsorted.Tensor,
    aten.searchsorted.Scalar,
    category=ELEMENTWISE,
    takes_op=True,
    dims=Equation("S,*,S->*", "*S,*q,*S->*q", "S,S->"),
)
def searchsorted(
    op: OpOverload, sequence: Dense, x: Dense | float, *, sorter: Dense | None = None, **options: bool | str | None
) -> Dense:
    """Elementwise in the input. Refused if an element of the sorted sequence is invalid: its order is unknown then."""
    require_all_valid(op, sequence)
    if sorter is not None:
        require_all_valid(op, sorter)
        options["sorter"] = sorter.data  # type: ignore[assignment]
    return positions_of(x, op(sequence.data, x.data if isinstance(x, Dense) else x, **options))


searchsorted.lowering(Sparse)(NEEDS_WHOLE_SEQUENCE)
searchsorted.lowering(Permuted)(NEEDS_WHOLE_SEQUENCE)


def require_all_valid(op: OpOverload, sequence: Dense) -> None:
    """Refuse a partly invalid sequence."""
    if not known_all_valid(sequence):
        raise MaskedSemanticsError(
            f"{packet_name(op)} searches an ordered sequence, and the given one, of shape {tuple(sequence.shape)}, is "
            "partly invalid: an invalid element has no position in an order, and whether it counts is undefined. "
            "Search x.compressed(), or fill it first with x.to_tensor(value)."
        )


def positions_of(x: Dense | float, positions: Tensor) -> Dense:
    return x.like(positions) if isinstance(x, Dense) else Dense(positions)
