"""Pooling.

Law: over the valid elements of the window. An average is their sum divided by their number (plus the padding that
`count_include_pad` counts) or by a given `divisor_override`; a maximum is their maximum. Valid where the window has a
valid element, or no elements at all.

torch's kernel runs once on the filled data and once on the mask, which may be as small as one channel of one sample.
The average of the mask is the valid share of the window, by which the average of the data is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    DERIVATIVE,
    POOLING,
    Dense,
    aligned_validity,
    as_bool,
    as_int8,
    autocast_on,
    fill_where_invalid,
    intersect,
    lowest,
    masked_rule,
)
from op_registry.bound import bind_by_name
from op_registry.dimensions.sizes import known_in_forward
from op_registry.ops.windows.convolution import Sizes

aten = torch.ops.aten


def numeric_validity(x: Dense, spatial: int) -> Tensor:
    """The validity as numbers: expanded in the pooled dimensions, as small as it is stored in the others."""
    v = aligned_validity(x)
    assert v is not None
    return v.expand(*v.shape[:-spatial], *x.shape[-spatial:]).to(
        torch.float32 if x.dtype.is_floating_point and x.dtype is not torch.float64 else torch.float64
    )


# ------------------------------------------------------------------------------------------------------------- averages


def averaged(
    average: Callable[[Tensor], Tensor],
    x: Dense,
    spatial: int,
    count_padding: bool = False,
    divide: bool = True,
    to_integer: Callable[[Tensor], Tensor] = torch.trunc,
) -> Dense:
    """`average(tensor)` over valid elements, for operators that are a weighted mean with positive weights.

    count_padding  whether the divisor counts padding
    divide         whether the operator divides by the number of elements
    to_integer     how results of integer data are rounded
    """
    if x.validity is None:
        return Dense(average(x.data))
    integers = not x.dtype.is_floating_point
    mask = numeric_validity(x, spatial)
    # Data and mask in one dtype, so that half-precision kernels round their weights alike; autocast chooses its own.
    same_dtype = integers or not autocast_on(x.device)
    data = average(x.filled(0).to(mask.dtype if same_dtype else x.dtype))
    valid_share = average(mask)
    valid = valid_share != 0
    if not divide:
        return Dense((to_integer(data) if integers else data).to(x.dtype if same_dtype else data.dtype), as_int8(valid))
    if count_padding:
        element_share = average(mask.new_ones((*[1] * (x.ndim - spatial), *x.shape[-spatial:])))
        valid_share = 1 - (element_share - valid_share)
    # A window without valid elements is divided by 1: its derivative must be finite.
    quotient = data / torch.where(valid, valid_share, 1)
    if integers:
        return Dense(whole(quotient, to_integer).to(x.dtype), as_int8(valid))
    return Dense(quotient.to(x.dtype if same_dtype else data.dtype), as_int8(valid))


def whole(mean: Tensor, to_integer: Callable[[Tensor], Tensor] = torch.trunc) -> Tensor:
    """A mean of integers as an integer: three roundings may have put it just below a whole number."""
    return to_integer(mean * (1 + 4 * torch.finfo(mean.dtype).eps))


@masked_rule(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, category=POOLING, takes_op=True)
def avg_pool(op: OpOverload, self: Dense, *window: Any) -> Dense:
    named = bind_by_name(op, (self, *window), {})
    count_padding, divide = named["count_include_pad"], named.get("divisor_override") is None
    return averaged(lambda x: op(x, *window), self, spatial_dims(op), count_padding, divide)


@masked_rule(
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    category=POOLING,
    takes_op=True,
)
def adaptive_avg_pool(op: OpOverload, self: Dense, output_size: Sizes) -> Dense:
    return averaged(lambda x: op(x, output_size), self, spatial_dims(op))


def spatial_dims(op: OpOverload) -> int:
    """The number of pooled dimensions: the digit before the "d" in the operator's name."""
    name = op._schema.name
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


# --------------------------------------------------------------------------------------------------------------- maxima


def max_pooled(pool: Callable[[Tensor], Any], x: Dense, spatial: int) -> Any:
    """`pool(tensor)` over valid elements: maxima, or maxima and their indices."""
    result = pool(x.filled(lowest(x.dtype)))
    if x.validity is None:
        validity = None
    else:
        of_mask = pool(numeric_validity(x, spatial))
        # 1 if the window has a valid element, 0 if not, and -inf if it has only padding.
        validity = as_int8((of_mask if isinstance(of_mask, Tensor) else of_mask[0]) != 0)
    if isinstance(result, Tensor):
        return Dense(result, validity)
    return tuple(Dense(r, validity) for r in result)


def maximum(op: OpOverload, self: Dense, *window: Any) -> Any:
    return max_pooled(lambda x: op(x, *window), self, spatial_dims(op))


max_pool = masked_rule(
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    category=POOLING,
    takes_op=True,
)(maximum)
adaptive_max_pool = masked_rule(
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    category=POOLING,
    takes_op=True,
)(maximum)


@masked_rule(
    aten.fractional_max_pool2d.default,
    aten.fractional_max_pool3d.default,
    category=POOLING,
    takes_op=True,
)
def fractional_max_pool(
    op: OpOverload, self: Dense, kernel_size: Sizes, output_size: Sizes, random_samples: Dense
) -> Any:
    """Every channel of every sample has its own windows, so this expands the mask to full size.

    If the random numbers that place a channel's windows are invalid, so are its results.
    """

    if self.data.requires_grad and spatial_dims(op) == 2:
        known_in_forward(self.shape)

    def pool(x: Tensor) -> Any:
        # Data and mask in one dtype, because the dtype affects where windows begin.
        return op(x.to(self.dtype), kernel_size, output_size, random_samples.filled(0.5))

    results = max_pooled(pool, Dense(self.data, self.full_validity), spatial_dims(op))
    validity = random_samples.full_validity
    if validity is None:
        return results
    windows_valid = as_bool(validity).all(-1)
    windows_valid = windows_valid.reshape(self.shape[: -spatial_dims(op)] + (1,) * spatial_dims(op))
    return tuple(result.masked_by(windows_valid) for result in results)


@masked_rule(aten.max_pool2d_with_indices_backward.default, category=DERIVATIVE)
def max_pool2d_with_indices_backward(grad_output: Dense, self: Dense, *arguments: Any) -> Dense:
    """Each gradient goes to the maximum to which `indices`, the last argument, points; an invalid one goes nowhere."""
    *geometry, indices = arguments
    counted = fill_where_invalid(grad_output.data, intersect(grad_output.validity, indices.validity), 0)
    return self.like(aten.max_pool2d_with_indices_backward(counted, self.data, *geometry, indices.filled(0)))
