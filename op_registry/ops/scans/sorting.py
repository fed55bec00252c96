"""Sorting: sort, topk, kthvalue, median, mode, searchsorted; argsort and msort decompose into sort.

Law: valid elements in order, first, in both directions; the first n places are valid. What picks one element of the
order (kthvalue, median, mode) is a reduction: it picks among the valid ones, and its index is theirs.

One stable sort of data filled with anything, then a stable move of the valid ones to the front: no fill value could
keep invalid elements behind valid infinities, NaN and extreme integers. Values are gathered from the input, so that
gradients go where the indices point.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ELEMENTWISE,
    REDUCTION,
    SORTING,
    Dense,
    MaskedSemanticsError,
    Order,
    Permuted,
    Slices,
    Sparse,
    arange_along,
    as_int8,
    extremum,
    flattened,
    known_all_valid,
    lowest,
    masked_rule,
    masked_slices,
    never,
    packet_name,
    reduced_dims,
    sort_valid,
    squeeze_reduced,
)

aten = torch.ops.aten


@masked_slices(aten.sort, category=SORTING, slices=Slices("front", positions=(1,)))
def sort(
    op: OpOverload, x: Dense, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Dense, Dense]:
    """Stable, asked for or not."""
    if x.ndim == 0:
        values, index = aten.sort(x.data, dim, descending)
        return x.like(values), x.like(index)
    order = sort_valid(x, dim, descending)
    validity = as_int8(arange_along(x.shape[dim], dim, x.data) < order.count)
    return Dense(order.values, validity), Dense(order.index, validity)


@masked_slices(aten.topk, category=SORTING, slices=Slices("front", positions=(1,), number="k"))
def topk(
    op: OpOverload, x: Dense, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Dense, Dense]:
    """The first k of the order."""
    if x.ndim == 0 or not 0 <= k <= x.shape[dim]:
        values, index = op(x.data, k, dim, largest, sorted)  # raises torch's error
        return Dense(values, x.validity if k else None), Dense(index, x.validity if k else None)
    order = sort_valid(x, dim, descending=largest)
    validity = as_int8(arange_along(k, dim, x.data) < order.count)
    return Dense(order.values.narrow(dim, 0, k), validity), Dense(order.index.narrow(dim, 0, k), validity)


# -------------------------------------------------------------------------------------------- one element of the order


def picked(x: Dense, order: Order, place: Tensor, dim: int, keepdim: bool, exists: Tensor) -> tuple[Dense, Dense]:
    """The element at a place of the order, and where it comes from."""
    place = place.clamp(min=0)
    results = (order.values.gather(dim, place), order.index.gather(dim, place))
    dims = reduced_dims(x, dim)
    values, index = (Dense(squeeze_reduced(dims, r, keepdim), squeeze_reduced(dims, exists, keepdim)) for r in results)
    return values, index


@masked_slices(aten.kthvalue, category=REDUCTION, slices=Slices(positions=(1,), number="k"))
def kthvalue(op: OpOverload, x: Dense, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Dense, Dense]:
    """Valid where there are k valid elements."""
    if x.ndim == 0 or not 1 <= k <= x.shape[dim]:
        values, index = op(x.data, k, dim, keepdim)  # raises torch's error
        return x.like(values), x.like(index)
    order = sort_valid(x, dim)
    place = torch.full_like(order.count, k - 1)
    return picked(x, order, place, dim, keepdim, as_int8(order.count >= k))


@masked_slices(aten.median.dim, aten.nanmedian.dim, category=REDUCTION, slices=Slices(positions=(1,)))
def median(op: OpOverload, x: Dense, dim: int, keepdim: bool = False) -> tuple[Dense, Dense]:
    """The lower median. With NaN among the valid elements it is the first of them; nanmedian passes over those."""
    if x.ndim == 0:
        values, index = op(x.data, dim, keepdim)
        return x.like(values), x.like(index)
    order = sort_valid(x, dim)
    place = middle(order, dim, ignore_nan=op is aten.nanmedian.dim)
    return picked(x, order, place, dim, keepdim, as_int8(order.count > 0))


def middle(order: Order, dim: int, ignore_nan: bool) -> Tensor:
    """The place of the median in the order: NaN stand last among the valid elements."""
    nans = order.values.detach().isnan().sum(dim, keepdim=True)
    numbers = order.count - nans
    half = (numbers - 1).div(2, rounding_mode="floor").clamp(min=0)
    return half if ignore_nan else torch.where(nans > 0, numbers, half)


@masked_slices(aten.median.default, aten.nanmedian.default, category=REDUCTION, slices=Slices())
def median_of_all(op: OpOverload, x: Dense) -> Dense:
    """As one slice. The gradient is shared by the valid elements that equal it, as torch shares it."""
    flat = flattened(x)
    order = sort_valid(Dense(flat.data.detach(), flat.validity), 0)
    place = middle(order, 0, ignore_nan=op is aten.nanmedian.default)
    value = order.values.gather(0, place)
    equal = (flat.data.detach() == value) | (flat.data.detach() != flat.data.detach()) & (value != value)
    ties = flat.masked_by(as_int8(equal))
    result = extremum(ties, lowest(x.dtype), None, False, lambda t: t.amax())
    return Dense(result.data, x.any_valid())


@masked_slices(aten.mode, category=REDUCTION, slices=Slices(positions=(1,)))
def mode(op: OpOverload, x: Dense, dim: int = -1, keepdim: bool = False) -> tuple[Dense, Dense]:
    """The least of the most frequent values, and where it was seen last; NaN equals nothing, itself included."""
    if x.ndim == 0:
        values, index = op(x.data, dim, keepdim)
        return x.like(values), x.like(index)
    order = sort_valid(x, dim)
    size = x.shape[dim]
    values, place = order.values.detach(), arange_along(size, dim, x.data)
    differs = values.narrow(dim, 1, size - 1) != values.narrow(dim, 0, size - 1)
    starts = torch.cat([torch.ones_like(values.narrow(dim, 0, 1), dtype=torch.bool), differs], dim)
    run_start = torch.where(starts, place, 0).cummax(dim).values
    run_length = torch.where(place < order.count, place - run_start + 1, 0)
    return picked(x, order, run_length.argmax(dim, keepdim=True), dim, keepdim, as_int8(order.count > 0))


# ---------------------------------------------------------------------------------------------- places in a sequence


@masked_rule(aten.bucketize.Tensor, aten.bucketize.Scalar, category=ELEMENTWISE, takes_op=True)
def bucketize(op: OpOverload, x: Dense | float, boundaries: Dense, **how: bool) -> Dense:
    """Element by element; every boundary has to be valid."""
    all_of(op, boundaries)
    return looked_up(x, op(x.data if isinstance(x, Dense) else x, boundaries.data, **how))


NO_ORDER_IN_PARTS = never("every element is looked up in the whole sequence")
bucketize.lowering(Sparse)(NO_ORDER_IN_PARTS)
bucketize.lowering(Permuted)(NO_ORDER_IN_PARTS)


@masked_rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar, category=ELEMENTWISE, takes_op=True)
def searchsorted(
    op: OpOverload, sequence: Dense, x: Dense | float, *, sorter: Dense | None = None, **how: bool | str | None
) -> Dense:
    """Element by element; the whole sequence has to be valid."""
    all_of(op, sequence)
    if sorter is not None:
        all_of(op, sorter)
        how["sorter"] = sorter.data  # type: ignore[assignment]
    return looked_up(x, op(sequence.data, x.data if isinstance(x, Dense) else x, **how))


searchsorted.lowering(Sparse)(NO_ORDER_IN_PARTS)
searchsorted.lowering(Permuted)(NO_ORDER_IN_PARTS)


def all_of(op: OpOverload, sequence: Dense) -> None:
    """Refuse a sequence with gaps."""
    if not known_all_valid(sequence):
        raise MaskedSemanticsError(
            f"{packet_name(op)} finds places in an ordered sequence, of shape {tuple(sequence.shape)}, of which a part "
            "is invalid: a gap has no place in an order, and nothing says whether it counts. Look up in "
            "x.compressed(), or fill it first with x.to_tensor(value)."
        )


def looked_up(x: Dense | float, places: Tensor) -> Dense:
    return x.like(places) if isinstance(x, Dense) else Dense(places)
