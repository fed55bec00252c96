"""Accumulating by index.

Law: a reduction over the valid contributions, and over self where it is included and valid; valid with at least one
valid contribution or a valid self. A contribution is valid where the source and the index are. With
`include_self=False`, an element without a valid contribution keeps self, like one without any contribution in torch.

Sums fill with 0. The other reductions send invalid contributions to a spare slot past the end, so that a mean does not
count them and they take no part in a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ACCUMULATION,
    ASSIGNMENT,
    Dense,
    MaskedSemanticsError,
    Number,
    Unknown,
    accumulation_dtype,
    aligned_validity,
    as_bool,
    as_int8,
    fill_where_invalid,
    highest,
    intersect,
    known_all_valid,
    lowest,
    masked_rule,
)
from op_registry.dimensions.movements import Indexed, Windows
from op_registry.ops.indexing.assignment import assigned, checked_index, put_where_valid
from op_registry.ops.indexing.rules import reshape_along
from op_registry.records.layout import full_mask

aten = torch.ops.aten


def corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The part of a scatter's source that an index of `shape` uses."""
    if tensor.ndim != len(shape):
        return tensor
    for d, size in enumerate(shape):
        tensor = tensor.narrow(d, 0, size)
    return tensor


def contribution_validity(index: Dense, source: Dense) -> Tensor | None:
    """Where the contributions of a scatter are valid, in the shape of its index; None: everywhere."""
    v = source.full_validity
    return intersect(None if v is None else corner(v, index.shape), index.full_validity)


def checked_scatter_index(x: Dense, dim: int, index: Dense) -> Tensor:
    """A scatter's index with 0 where it is invalid; raises torch's error where a valid entry is out of range."""
    safe = index.filled(0)
    if index.validity is not None:
        aten.gather(x.data.detach(), dim, safe)
    return safe


def accumulated_validity(x: Dense, dim: int, safe: Tensor, valid: Tensor | None) -> Tensor | None:
    """Validity of an accumulation: valid in self, or with at least one valid contribution."""
    if x.validity is None:
        return None
    contributions = torch.ones_like(safe) if valid is None else valid.expand(safe.shape)
    return as_int8(aten.scatter_add(full_mask(x).to(torch.int32), dim, safe, contributions.to(torch.int32)) > 0)


# ------------------------------------------------------------------------------------------------------------ scatter


@masked_rule(aten.scatter.src, category=ASSIGNMENT, dims=Indexed(aligned=True, writes=True))
def scatter(x: Dense, dim: int, index: Dense, src: Dense) -> Dense:
    safe = checked_scatter_index(x, dim, index)

    def put(target: Tensor, values: Tensor) -> Tensor:
        return put_where_valid(target, dim, safe, index.full_validity, lambda t, i: aten.scatter(t, dim, i, values))

    return assigned(x, src, put)


@masked_rule(aten.scatter.value, category=ASSIGNMENT, dims=Indexed(aligned=True, writes=True))
def scatter_value(x: Dense, dim: int, index: Dense, value: Number) -> Dense:
    safe = checked_scatter_index(x, dim, index)

    def put(target: Tensor, written: Number) -> Tensor:
        return put_where_valid(target, dim, safe, index.full_validity, lambda t, i: aten.scatter(t, dim, i, written))

    data, v = put(x.data, value), x.full_validity
    return Dense(data, None if v is None else put(as_int8(v), 1))


@masked_rule(aten.scatter.reduce, category=ACCUMULATION, dims=Indexed(aligned=True, writes=True))
def scatter_with_reduce(x: Dense, dim: int, index: Dense, src: Dense, *, reduce: str) -> Dense:
    valid, safe = contribution_validity(index, src), checked_scatter_index(x, dim, index)
    neutral = 1 if reduce == "multiply" else 0
    values = src.data if valid is None else fill_where_invalid(corner(src.data, index.shape), valid, neutral)
    data = aten.scatter(x.filled(neutral), dim, safe, values, reduce=reduce)
    return Dense(data, accumulated_validity(x, dim, safe, valid))


@masked_rule(aten.scatter.value_reduce, category=ACCUMULATION, dims=Indexed(aligned=True, writes=True))
def scatter_value_with_reduce(x: Dense, dim: int, index: Dense, value: Number, *, reduce: str) -> Dense:
    valid, safe = index.full_validity, checked_scatter_index(x, dim, index)
    target = x.filled(1 if reduce == "multiply" else 0)
    data = put_where_valid(target, dim, safe, valid, lambda t, i: aten.scatter(t, dim, i, value, reduce=reduce))
    return Dense(data, accumulated_validity(x, dim, safe, valid))


@masked_rule(aten.scatter_add.default, category=ACCUMULATION, dims=Indexed(aligned=True, writes=True))
def scatter_add(x: Dense, dim: int, index: Dense, src: Dense) -> Dense:
    valid, safe = contribution_validity(index, src), checked_scatter_index(x, dim, index)
    values = src.data if valid is None else fill_where_invalid(corner(src.data, index.shape), valid, 0)
    return Dense(aten.scatter_add(x.filled(0), dim, safe, values), accumulated_validity(x, dim, safe, valid))


@masked_rule(
    aten.scatter_reduce.two, category=ACCUMULATION, torch_if_valid=True, dims=Indexed(aligned=True, writes=True)
)
def scatter_reduce(x: Dense, dim: int, index: Dense, src: Dense, reduce: str, *, include_self: bool = True) -> Dense:
    return reduce_by_index(x, dim, index, src, reduce, include_self)


def reduce_by_index(x: Dense, dim: int, index: Dense, src: Dense, reduce: str, include_self: bool) -> Dense:
    """scatter_reduce, with invalid contributions sent to a spare slot."""
    valid, safe = contribution_validity(index, src), checked_scatter_index(x, dim, index)
    # In the spare slot 1 does no harm to any reduction, nor to the derivative of prod.
    values = src.data if valid is None else fill_where_invalid(corner(src.data, index.shape), valid, 1)

    def put(target: Tensor, reduction: str) -> Tensor:
        def reduced(t: Tensor, i: Tensor) -> Tensor:
            return aten.scatter_reduce(t, dim, i, values, reduction, include_self=include_self)

        return put_where_valid(target, dim, safe, valid, reduced)

    validity = accumulated_validity(x, dim, safe, valid)
    if not include_self:
        return Dense(put(x.filled(1), reduce), validity)
    if reduce == "mean" and x.validity is not None:
        # torch would count an invalid self.
        ones = torch.ones_like(safe, dtype=torch.int32) if valid is None else valid.expand(safe.shape).to(torch.int32)
        number = aten.scatter_add(full_mask(x).to(torch.int32), dim, safe, ones).clamp(min=1)
        return Dense(divided(put(x.filled(0), "sum"), number), validity)
    return Dense(put(x.filled(identity_of(reduce, x.dtype)), reduce), validity)


def divided(total: Tensor, number: Tensor) -> Tensor:
    """total / number, rounded like torch's indexed means: integers downward."""
    if not (total.dtype.is_floating_point or total.dtype.is_complex):
        return torch.div(total, number, rounding_mode="floor").to(total.dtype)
    return (total.to(accumulation_dtype(total.dtype)) / number).to(total.dtype)


def identity_of(reduce: str, dtype: torch.dtype) -> Number:
    """The identity element of `reduce`; torch itself raises for reductions that have none."""
    if reduce in ("amax", "amin") and not dtype.is_complex:
        return lowest(dtype) if reduce == "amax" else highest(dtype)
    return 1 if reduce == "prod" else 0


# -------------------------------------------------------------------------------------------------- along a dimension


@masked_rule(aten.index_add.default, category=ACCUMULATION, dims=Indexed(writes=True))
def index_add(x: Dense, dim: int, index: Dense, source: Dense, *, alpha: Number = 1) -> Dense:
    safe = index.filled(0)
    valid = intersect(aligned_validity(source), reshape_along(index.full_validity, dim, source.ndim))
    data = aten.index_add(x.filled(0), dim, safe, fill_where_invalid(source.data, valid, 0), alpha=alpha)
    if x.validity is None:
        return Dense(data)
    contributions = source.data.new_ones((), dtype=torch.int32) if valid is None else as_bool(valid).to(torch.int32)
    number = aten.index_add(full_mask(x).to(torch.int32), dim, safe, contributions.expand(source.shape))
    return Dense(data, as_int8(number > 0))


@masked_rule(aten.index_reduce.default, category=ACCUMULATION, torch_if_valid=True, dims=Indexed(writes=True))
def index_reduce(x: Dense, dim: int, index: Dense, source: Dense, reduce: str, *, include_self: bool = True) -> Dense:
    # An index for each element, so that single elements can be sent to the spare slot.
    checked_index(x, dim, index)
    full_index = index.map(lambda i: _reshaped_along(i, dim, source.ndim).expand(source.shape))
    return reduce_by_index(x, dim, Dense(full_index.data.long(), full_index.validity), source, reduce, include_self)


def _reshaped_along(index: Tensor, dim: int, ndim: int) -> Tensor:
    reshaped = reshape_along(index, dim, ndim)
    assert reshaped is not None
    return reshaped


# -------------------------------------------------------------------------------------- max_unpool and segment_reduce


@masked_rule(
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    category=ASSIGNMENT,
    takes_op=True,
    torch_if_valid=True,
    dims=Windows(),
)
def max_unpool(op: OpOverload, x: Dense, indices: Dense, output_size: Sequence[int], *options: Sequence[int]) -> Dense:
    """Elements at the positions from which they were pooled, in valid zeros; an invalid index writes nothing."""
    data = op(x.filled(0), indices.filled(0), output_size, *options)
    valid, safe = indices.full_validity, indices.filled(0).flatten(-len(output_size))

    def put(values: Tensor) -> Tensor:
        flat = values.flatten(-len(output_size))
        zeros = flat.new_zeros((*flat.shape[:-1], math.prod(output_size)))
        flat_valid = None if valid is None else valid.flatten(-len(output_size))
        return put_where_valid(zeros, -1, safe, flat_valid, lambda t, i: aten.scatter(t, -1, i, flat)).reshape(
            data.shape
        )

    invalid = put(as_int8(full_mask(x)) ^ 1)
    return Dense(data if valid is None else put(x.filled(0)), invalid ^ 1)


@masked_rule(
    aten.segment_reduce.default, category=ACCUMULATION, dims=Unknown("segments of several lengths lie in one dimension")
)
def segment_reduce(
    x: Dense,
    reduce: str,
    *,
    lengths: Dense | None = None,
    indices: Dense | None = None,
    offsets: Dense | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Number | None = None,
) -> Dense:
    """Reductions of consecutive segments; an initial value is a valid contribution to each.

    Refused if `lengths` or `offsets` are partly invalid: it is unknown then where a segment begins.
    """
    bounds: dict[str, Tensor | None] = {}
    for name, bound in (("lengths", lengths), ("indices", indices), ("offsets", offsets)):
        if bound is not None and not known_all_valid(bound):
            raise MaskedSemanticsError(
                f"segment_reduce needs to know where each segment ends, and {name} of shape {tuple(bound.shape)} is "
                f"partly invalid. Fill it first with {name}.to_tensor(value)."
            )
        bounds[name] = None if bound is None else bound.data

    def reduced(values: Tensor, reduction: str, start: Number | None = None) -> Tensor:
        return aten.segment_reduce(values, reduction, axis=axis, unsafe=unsafe, initial=start, **bounds)

    if x.validity is None:
        return Dense(reduced(x.data, reduce, initial))
    v = full_mask(x).to(torch.float32)
    number, length = reduced(v, "sum"), reduced(torch.ones_like(v), "sum")
    if reduce == "mean":
        total = reduced(x.filled(0), "sum", initial)
        mean = (total.to(accumulation_dtype(x.dtype)) / number.clamp(min=1)).to(x.dtype)
        data = torch.where(number > 0, mean, math.nan if initial is None else initial)
    else:
        identity = {"max": -math.inf, "min": math.inf, "prod": 1}.get(reduce, 0)
        data = reduced(x.filled(identity), reduce, initial)
    return Dense(data, as_int8((number > 0) | (length == 0)) if initial is None else None)
