"""Reductions: sum, mean, var, amax, argmax, any, logsumexp …

Law: torch's result on the slice with its invalid elements removed; valid where n ≥ 1 or the slice has
size 0, where n is the number of valid elements. Indices refer to the original dimension and never point at an invalid
element.

Most rules fill with the operator's identity, which does not change the result. Three cases need more than that.

* A *divisor* counts the valid elements (mean, var).
* A *tie with the identity*: the maximum of valid elements that are all -inf equals the fill. Its value is right, but
  its index may point at a fill, and amax would share its gradient with the fills.
* A *kink*: the derivative of std at 0 is 0 in torch, not infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.authoring import (
    REDUCTION,
    Dense,
    Equation,
    Number,
    Rule,
    Slices,
    accumulation_dtype,
    as_bool,
    fill_where_invalid,
    highest,
    lowest,
    masked_rule,
    masked_slices,
    over_slices,
    packet_name,
    reduction,
    safe_sqrt,
    valid_in_all,
)
from op_registry.records.arguments import Dims
from op_registry.records.slices import (
    DenseSlices,
    Over,
    Spread,
    extremum,
    filled_for_exp_alone,
    first_valid_index,
    flattened,
    identity_of,
    is_inexact,
    nonzero_count,
    reduced_dims,
    spread,
    squeeze_reduced,
    undivided_slices,
)
from op_registry.records.tracing import may_be_read

aten = torch.ops.aten

sum = reduction(aten.sum.default, aten.sum.dim_IntList, identity=0)
nansum = reduction(aten.nansum, identity=0)
prod = reduction(aten.prod.default, aten.prod.dim_int, identity=1, mixed_derivative=True)  # one 0 anywhere decides
any = reduction(aten.any.default, aten.any.dim, identity=False)
all = reduction(aten.all.default, aten.all.dim, identity=True)


@masked_slices(aten.any.dims, aten.all.dims, category=REDUCTION, dims=Slices(none_for_no_dims=True))
def any_all_dims(op: OpOverload, x: Dense, dim: list[int] | None = None, keepdim: bool = False) -> Dense:
    """Over a list of dimensions; unlike elsewhere in torch, an empty list reduces nothing."""
    result = op(x.filled(op is aten.all.dims), dim, keepdim)
    return x.like(result) if dim is not None and len(dim) == 0 else Dense(result, x.any_valid(dim, keepdim))


# ------------------------------------------------------------------------------------------------------- mean, var, std


@over_slices(aten.mean.default, aten.mean.dim, category=REDUCTION, dims=Slices(), identity=0, divided=True)
def mean(op: OpOverload, over: Over, x: Dense, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of the valid elements divided by their number."""
    result = dtype or x.dtype
    if not is_inexact(result):
        aten.mean.default(x.data, dtype=dtype)  # raises torch's error
    total = over.sum(x.filled(0), accumulation_dtype(result))
    return (total / nonzero_count(over.count(x))).to(result)


@over_slices(
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    category=REDUCTION,
    dims=Slices(neutral=None),
)
def var(op: OpOverload, over: Over, x: Dense, correction: Number | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The sum of squared deviations divided by n - correction: NaN or infinity where the divisor is not positive.

    It is cast last to the dtype that torch returns: the root of what overflows there may not.
    """
    if not is_inexact(x.dtype) or isinstance(correction, complex):
        op(x.data, correction=correction)  # raises torch's error
    m, name = spread(x, over), packet_name(op)
    result = variance(m, correction)
    result = (safe_sqrt(result) if "std" in name else result).to(x.dtype.to_real())
    return (result, m.mean.to(x.dtype)) if "mean" in name else result


def variance(m: Spread, correction: Number | None) -> Tensor:
    """Σ|x - mean|² / (n - correction), in the shape of the moments."""
    correction = 1 if correction is None else correction
    assert not isinstance(correction, complex)  # torch has raised
    # A count minus a fraction would be of torch's default dtype.
    count = m.count if isinstance(correction, int) else m.count.to(m.square.dtype)
    divisor = torch.where(as_bool(m.exists), (count - correction).to(m.square.dtype), 1)
    quotient = m.square / divisor
    if correction > 1:
        # For a negative divisor torch returns the value of a division by 0, but the derivative of the real quotient.
        quotient = quotient + torch.where(divisor < 0, m.square.detach() / 0, 0)
    return quotient


# -------------------------------------------------------------------------------------------------------------- extrema


def extreme(*operators: OpOverload | OpOverloadPacket, identity: Callable[[torch.dtype], Number]) -> Rule:
    """The rule of the maximum or the minimum."""

    @over_slices(*operators, category=REDUCTION, dims=Slices(), identity=identity)
    def of_valid_elements(op: OpOverload, over: Over, x: Dense) -> Tensor:
        """The maximum (minimum) of the valid elements; those that equal it share its gradient."""
        if x.dtype.is_complex:
            op(x.data)  # raises torch's error
        whole = isinstance(over, DenseSlices) and op._schema.name in ("aten::max", "aten::min")  # faster than amax
        return extremum(x, over, "amax" if identity is lowest else "amin", op if whole else None)

    return of_valid_elements


amax = extreme(aten.amax, aten.max.default, identity=lowest)
amin = extreme(aten.amin, aten.min.default, identity=highest)


@over_slices(aten.aminmax, category=REDUCTION, dims=Slices(), exact_out=True)
def aminmax(op: OpOverload, over: Over, x: Dense) -> tuple[Tensor, Tensor]:
    """Minimum and maximum. They need different fills, so each is a reduction of its own."""
    if x.dtype.is_complex:
        op(x.data)  # raises torch's error
    return extremum(x, over, "amin"), extremum(x, over, "amax")


@masked_slices(aten.max.dim, aten.min.dim, category=REDUCTION, dims=Slices(positions=(1,)))
def max(op: OpOverload, x: Dense, dim: int, keepdim: bool = False) -> tuple[Dense, Dense]:
    """The maximum (minimum) of the valid elements along a dimension, and its index."""
    x = undivided_slices(x, dim)  # torch looks for positions in each part, and one of them may be empty
    exists, dims = x.any_valid(dim, keepdim), reduced_dims(x, dim)
    identity = identity_of(op, x.dtype)
    filled = x.filled(identity)
    values, index = op(filled, dim, True)
    index = torch.where(values == identity, first_valid_index(x, dim), index)
    values = filled.gather(dim, index)
    return Dense(squeeze_reduced(dims, values, keepdim), exists), Dense(squeeze_reduced(dims, index, keepdim), exists)


@masked_slices(aten.argmax, aten.argmin, category=REDUCTION, dims=Slices(positions=(0,)))
def argmax(op: OpOverload, x: Dense, dim: int | None = None, keepdim: bool = False) -> Dense:
    """The index of the first maximum (minimum) among valid elements, in the original dimension or the flat input."""
    exists = x.any_valid(dim, keepdim)
    along, axis = (flattened(x), 0) if dim is None else (x, dim)
    along = undivided_slices(along, axis)
    identity = identity_of(op, x.dtype)
    filled = along.filled(identity)
    index = op(filled, axis, True)
    index = torch.where(filled.gather(axis, index) == identity, first_valid_index(along, axis), index)
    if dim is None:
        return Dense(index.reshape((1,) * x.ndim if keepdim else ()), exists)
    return Dense(squeeze_reduced(reduced_dims(x, dim), index, keepdim), exists)


# ------------------------------------------------------------------------------------------------------------ logsumexp


@masked_slices(aten.logsumexp, category=REDUCTION, dims=Slices())
def logsumexp(op: OpOverload, x: Dense, dim: Dims, keepdim: bool = False) -> Dense:
    """Invalid elements contribute exp(-inf) = 0; integers are computed in the default dtype, as in torch."""
    x = x if is_inexact(x.dtype) else x.like(x.data.to(torch.get_default_dtype()))
    if may_be_read(x.data) and x.dtype.is_floating_point and x.each_slice_has_one(dim):
        result = logsumexp_by_softmax(x.filled(-math.inf), reduced_dims(x, dim), keepdim)
        if result is not None:
            return Dense(result, x.any_valid(dim, keepdim))
    return Dense(op(filled_for_exp_alone(x, dim), dim, keepdim), x.any_valid(dim, keepdim))


def logsumexp_by_softmax(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor | None:
    """The greatest element less its log_softmax, which is logsumexp to the rounding; None where one is infinite or NaN.

    On CPU, torch's exp takes ten times as long for -inf, which fills what is invalid; log_softmax's kernel does not.
    """
    if len(dims) != 1:
        return None
    peak, at = x.detach().max(dims[0], keepdim=True)
    if not bool(peak.isfinite().all()):
        return None
    result = x.gather(dims[0], at) - x.log_softmax(dims[0]).gather(dims[0], at)
    return squeeze_reduced(dims, result, keepdim)


# ---------------------------------------------------------------------------------------------------------------- norms


@masked_slices(aten.linalg_vector_norm, category=REDUCTION, dims=Slices(neutral=1))
def linalg_vector_norm(
    op: OpOverload,
    x: Dense,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Dense:
    """(Σ|x|^ord)^(1/ord), and its limits."""
    return filled_norm(x, ord, dim, keepdim, lambda t: op(t, ord, dim, keepdim, dtype=dtype_for(x, t, dtype)))


@masked_slices(aten.norm, category=REDUCTION, dims=Slices(neutral=1))
def norm(
    op: OpOverload,
    x: Dense,
    p: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Dense:
    """As linalg_vector_norm, for the four legacy overloads."""
    if op is aten.norm.Scalar:
        return filled_norm(x, p, None, False, lambda t: op(t, p))
    if op is aten.norm.ScalarOpt_dtype:
        return filled_norm(x, p, None, False, lambda t: op(t, p, dtype=dtype_for(x, t, dtype)))
    if op is aten.norm.ScalarOpt_dim:
        return filled_norm(x, p, dim, keepdim, lambda t: op(t, p, dim, keepdim))
    return filled_norm(x, p, dim, keepdim, lambda t: op(t, p, dim, keepdim, dtype=dtype_for(x, t, dtype)))


@masked_rule(aten.dist, category=REDUCTION, dims=Equation("*,*->"))
def dist(x: Dense, y: Dense, p: float = 2) -> Dense:
    """The norm of the differences over the elements that are valid in both."""
    validity = valid_in_all(x, y)
    if validity is None:
        return Dense(aten.dist(x.data, y.data, p))
    left, right = torch.broadcast_tensors(x.data, y.data)
    validity = validity.expand(left.shape)
    left, right = fill_where_invalid(left, validity, 0), fill_where_invalid(right, validity, 0)
    if p >= 0:
        return Dense(aten.dist(left, right, p), Dense(left, validity).any_valid())
    return filled_norm(Dense(left - right, validity), p, None, False, lambda d: aten.dist(d, torch.zeros_like(d), p))


def filled_norm(x: Dense, p: float | None, dim: Dims, keepdim: bool, compute: Callable[[Tensor], Tensor]) -> Dense:
    """`compute` on the data, with fills that contribute nothing to a norm of order `p`: 0, or infinity for p < 0.

    A slice without valid elements would be infinite throughout and is filled with 1. The norm of order -inf is the
    smallest magnitude.
    """
    exists = x.any_valid(dim, keepdim)
    if p is None or p >= 0:
        return Dense(compute(x.filled(0)), exists)
    x = x.like(x.filled(1).abs())  # the sign of a complex infinity is NaN
    if math.isinf(p):
        return Dense(extremum(x, DenseSlices(reduced_dims(x, dim), keepdim), "amin", compute), exists)
    slice_exists = x.any_valid(dim, keepdim=True)
    assert slice_exists is not None
    return Dense(compute(x.filled(torch.where(as_bool(slice_exists), math.inf, 1.0).to(x.dtype))), exists)


def dtype_for(x: Dense, computed: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """The requested dtype, made real where complex data have become real on the way."""
    return dtype.to_real() if dtype and x.dtype.is_complex and not computed.is_complex() else dtype
