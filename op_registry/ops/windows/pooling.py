"""Pooling.

Law: over the valid elements of the window. An average is their sum over their number (and the padding that
`count_include_pad` counts), a `divisor_override` is used as it is, a maximum is theirs. Valid where the window has a
valid element, or none at all.

torch's kernel runs once on filled data, and once on the mask, which may be as small as one channel of one sample: the
average of a mask is the share of the window that is valid, and what the data's average has to be divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import POOLING, Dense, aligned_validity, as_bool, as_int8, autocast_on, lowest, masked_rule

aten = torch.ops.aten

Sizes = Sequence[int]


def shares(x: Dense, spatial: int) -> Tensor:
    """The validity as numbers: of full size in the pooled dimensions, no larger than it is stored in the others."""
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
    beside_padding: bool = False,
    divide: bool = True,
    whole: Callable[[Tensor], Tensor] = torch.trunc,
) -> Dense:
    """`average(tensor)` over valid elements, for operators that are a weighted mean with positive weights.

    beside_padding  the divisor counts padding, which is always there
    divide          whether the operator divides by what it takes in
    whole           how integers come to be whole numbers again
    """
    if x.validity is None:
        return Dense(average(x.data))
    whole_numbers = not x.dtype.is_floating_point
    valid_part = shares(x, spatial)
    # Sums and shares by the same weights, which kernels for half precision round. Autocast has its own opinion.
    alike = whole_numbers or not autocast_on(x.device)
    data = average(x.filled(0).to(valid_part.dtype if alike else x.dtype))
    share = average(valid_part)
    valid = share != 0
    if not divide:
        return Dense((whole(data) if whole_numbers else data).to(x.dtype if alike else data.dtype), as_int8(valid))
    if beside_padding:
        elements = average(valid_part.new_ones((*[1] * (x.ndim - spatial), *x.shape[-spatial:])))
        share = 1 - (elements - share)
    # A window without valid elements is divided by 1: its derivative has to be finite.
    exact = data / torch.where(valid, share, 1)
    if whole_numbers:
        # A quotient that rounding has put just below a whole number is that number.
        return Dense(whole(exact * (1 + 1e-6)).to(x.dtype), as_int8(valid))
    return Dense(exact.to(x.dtype if alike else data.dtype), as_int8(valid))


@masked_rule(aten.avg_pool1d.default, category=POOLING)
def avg_pool1d(
    self: Dense,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Dense:
    def average(x: Tensor) -> Any:
        return aten.avg_pool1d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)

    return averaged(average, self, 1, count_include_pad)


@masked_rule(aten.avg_pool2d.default, aten.avg_pool3d.default, category=POOLING, takes_op=True)
def avg_pool2d(
    op: OpOverload,
    self: Dense,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Dense:
    def average(x: Tensor) -> Any:
        return op(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    spatial = 2 if op is aten.avg_pool2d.default else 3
    return averaged(average, self, spatial, count_include_pad, divide=divisor_override is None)


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
    def average(x: Tensor) -> Any:
        return op(x, output_size)

    return averaged(average, self, spatial_dims(op))


def spatial_dims(op: OpOverload) -> int:
    """How many dimensions a pooling operator pools: the number before the d in its name."""
    name = op._schema.name
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


# --------------------------------------------------------------------------------------------------------------- maxima


def greatest(pool: Callable[[Tensor], Any], x: Dense, spatial: int) -> Any:
    """`pool(tensor)`: a maximum, or a maximum and where it was found."""
    result = pool(x.filled(lowest(x.dtype)))
    if x.validity is None:
        validity = None
    else:
        found = pool(shares(x, spatial))
        # 1 where something is valid, 0 where nothing is, and -inf in a window of padding alone.
        validity = as_int8((found if isinstance(found, Tensor) else found[0]) != 0)
    if isinstance(result, Tensor):
        return Dense(result, validity)
    return tuple(Dense(r, validity) for r in result)


@masked_rule(
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    category=POOLING,
    takes_op=True,
)
def max_pool(
    op: OpOverload,
    self: Dense,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> Any:
    def pool(x: Tensor) -> Any:
        return op(x, kernel_size, stride, padding, dilation, ceil_mode)

    return greatest(pool, self, spatial_dims(op))


@masked_rule(
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    category=POOLING,
    takes_op=True,
)
def adaptive_max_pool(op: OpOverload, self: Dense, output_size: Sizes) -> Any:
    def pool(x: Tensor) -> Any:
        return op(x, output_size)

    return greatest(pool, self, spatial_dims(op))


@masked_rule(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, category=POOLING, takes_op=True)
def fractional_max_pool(
    op: OpOverload, self: Dense, kernel_size: Sizes, output_size: Sizes, random_samples: Dense
) -> Any:
    """Every channel of every sample has windows of its own: the mask is needed in full size, and where the random
    numbers that place the windows are invalid, what is in them is.
    """

    def pool(x: Tensor) -> Any:
        # In one dtype, which decides where windows begin.
        return op(x.to(self.dtype), kernel_size, output_size, random_samples.filled(0.5))

    results = greatest(pool, Dense(self.data, self.full_validity), spatial_dims(op))
    validity = random_samples.full_validity
    if validity is None:
        return results
    placed = as_bool(validity).all(-1)
    placed = placed.reshape(self.shape[: -spatial_dims(op)] + (1,) * spatial_dims(op))
    return tuple(result.masked_by(placed) for result in results)
