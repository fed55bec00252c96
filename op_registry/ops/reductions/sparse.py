"""Reductions on sparse storage, as segment reductions.

Law: that of rules.py; elements that are not stored are invalid and take no part. Each reduction is written in the sum
and the extremum of the stored elements of a slice (op_registry/sparse/segments.py), which take one pass over the stored
elements and can be compiled. Other operators and calls run on padded rows (op_registry/sparse/padded_rows.py).
"""

from __future__ import annotations

import math

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Number,
    Segments,
    Sparse,
    abs_squared,
    accumulation_dtype,
    as_bool,
    as_int8,
    distance,
    gradients_may_flow,
    identity_of,
    is_inexact,
    lowers_by_segments,
    nonzero_count,
    safe_sqrt,
    segment_exponentials,
    segment_validity,
    spread,
)
from op_registry.ops.reductions import rules as reductions
from op_registry.ops.reductions.rules import rounded, variance

aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------------------------- sums


@lowers_by_segments(reductions.sum, reductions.nansum)
def sum(over: Segments, x: Dense, op: OpOverload, *, dtype: torch.dtype | None = None) -> Dense:
    data = x.filled(0)
    result = dtype or (x.dtype if is_inexact(x.dtype) else torch.int64)
    if "nansum" in op._schema.name:
        data = data.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf) if x.dtype.is_floating_point else data
    if dtype is not None and not dtype.is_floating_point and is_inexact(x.dtype):
        raise NotLowered("torch sums in the wider dtype")
    return Dense(over.sum(data.to(accumulation_dtype(result))).to(result), segment_validity(over, x))


@lowers_by_segments(reductions.mean)
def mean(over: Segments, x: Dense, op: OpOverload, *, dtype: torch.dtype | None = None) -> Dense:
    result = dtype or x.dtype
    if not is_inexact(result):
        raise NotLowered("torch has no mean of integers")
    count = over.count(x)
    total = over.sum(x.filled(0).to(accumulation_dtype(result)))
    return Dense((total / nonzero_count(count)).to(result), segment_validity(over, x))


@lowers_by_segments(reductions.any, reductions.all, reductions.any_all_dims)
def any_all(over: Segments, x: Dense, op: OpOverload) -> Dense:
    is_all = "all" in op._schema.name
    decided = over.sum(((x.filled(is_all) != 0) != is_all).to(torch.int32)) > 0
    result = ~decided if is_all else decided
    return Dense(result.to(torch.uint8) if x.dtype is torch.uint8 else result, segment_validity(over, x))


# ------------------------------------------------------------------------------------------------------------- variance


@lowers_by_segments(reductions.var, reductions.std, reductions.var_mean, reductions.std_mean)
def var(over: Segments, x: Dense, op: OpOverload, *, correction: Number | None = None) -> Dense | tuple[Dense, Dense]:
    if not is_inexact(x.dtype) or isinstance(correction, complex):
        raise NotLowered("torch refuses it")
    m = spread(x, over)
    result = Dense(variance(m, correction), m.exists)
    name = op._schema.name
    result = rounded(x, safe_sqrt(result) if "std" in name else result)
    return (result, Dense(m.mean.to(x.dtype), m.exists)) if "mean" in name else result


# ------------------------------------------------------------------------------------------------------------- extremum


@lowers_by_segments(reductions.amax, reductions.amin, reductions.aminmax)
def amax(over: Segments, x: Dense, op: OpOverload) -> Dense | tuple[Dense, Dense]:
    if x.dtype.is_complex or x.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        raise NotLowered(f"torch has no segment extremum of {x.dtype}")
    name = op._schema.name.partition("::")[2]
    if name == "aminmax":
        return extremum(over, x, aten.amin.default), extremum(over, x, aten.amax.default)
    return extremum(over, x, aten.amax.default if "max" in name else aten.amin.default)


def extremum(over: Segments, x: Dense, op: OpOverload) -> Dense:
    """The maximum (minimum); its derivative is that of the mean of the valid elements that equal it."""
    filled = Dense(x.data.detach(), x.validity).filled(identity_of(op, x.dtype))
    peak = over.extremum(filled, "amax" if op is aten.amax.default else "amin")
    exists = segment_validity(over, x)
    if not (x.dtype.is_floating_point and gradients_may_flow(x.data)):
        return Dense(peak, exists)
    ties = as_int8(Dense((filled == over.broadcast_to_elements(peak)) | (filled != filled), x.validity).filled(False))
    base = torch.where(peak.isinf(), 0, peak)
    rest = over.sum(Dense(x.data - over.broadcast_to_elements(base), ties).filled(0))
    tie_count = nonzero_count(over.count(Dense(x.data, ties)))
    return Dense((base + rest / tie_count).to(x.dtype), exists)


# --------------------------------------------------------------------------------------------------------- exponentials


@lowers_by_segments(reductions.logsumexp)
def logsumexp(over: Segments, x: Dense, op: OpOverload) -> Dense:
    x = x if is_inexact(x.dtype) else x.like(x.data.to(torch.get_default_dtype()))
    if x.dtype.is_complex:
        raise NotLowered("complex numbers have no maximum")
    wide, peak, _ = segment_exponentials(over, x)
    base = torch.where(peak.isinf(), 0, peak)
    shifted = Dense(wide.data - over.broadcast_to_elements(base), wide.validity)
    total = over.sum(Dense(shifted.filled(0).exp(), x.validity).filled(0))
    exists = as_bool(segment_validity(over, x))
    # A slice of -inf only: the result is -inf, and its derivative that of the sum, 0.
    all_minus_inf = exists & (peak == -math.inf)
    logarithm = torch.where(all_minus_inf, total - math.inf, torch.where(exists & ~all_minus_inf, total, 1).log())
    return Dense((logarithm + base).to(x.dtype), as_int8(exists))


# ---------------------------------------------------------------------------------------------------------------- norms


@lowers_by_segments(reductions.linalg_vector_norm, reductions.norm)
def vector_norm(
    over: Segments,
    x: Dense,
    op: OpOverload,
    *,
    ord: float | None = 2,  # of linalg_vector_norm
    p: float | None = 2,  # of norm
    dtype: torch.dtype | None = None,
) -> Dense:
    asked = ord if p == 2 else p
    order = 2.0 if asked is None else float(asked)
    if order not in (1.0, 2.0, math.inf) or x.dtype is torch.complex32 or not is_inexact(x.dtype) or dtype is not None:
        raise NotLowered(f"there is no segment norm of order {order}, or the dtypes differ")
    filled = x.filled(0)
    wide = filled.to(accumulation_dtype(x.dtype))
    exists = segment_validity(over, x)
    real = x.dtype.to_real()
    if order == 2:
        return Dense(safe_sqrt(Dense(over.sum(abs_squared(wide)))).data.to(real), exists)
    if order == 1:
        return Dense(over.sum(wide.abs()).to(real), exists)
    return extremum(over, Dense(filled.abs(), x.validity), aten.amax.default)


@reductions.dist.lowering(Sparse)
def dist(op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, p: float = 2) -> Dense:
    return distance(x, y, p, None)
