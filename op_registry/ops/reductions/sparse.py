"""Reductions and softmax on sparse storage, by segments.

Law: as reductions.py and softmax.py have it; what is not stored is invalid, so it takes no part. Each is
written with the sum and the extremum of the stored elements of a slice (segments.py), which cost one pass over what is
stored and can be compiled. An operator or a call that is not written so runs on lines (slice_lowering.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
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
    moments,
    nonzero_count,
    safe_sqrt,
    segment_exponentials,
    segment_validity,
)
from op_registry.ops.reductions import rules as reductions
from op_registry.ops.reductions.rules import variance

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------------------- sums


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
        raise NotLowered("torch takes no mean of integers")
    count = over.count(x)
    total = over.sum(x.filled(0).to(accumulation_dtype(result)))
    return Dense((total / nonzero_count(count)).to(result), segment_validity(over, x))


@lowers_by_segments(reductions.any, reductions.all, reductions.any_all_dims)
def any_all(over: Segments, x: Dense, op: OpOverload) -> Dense:
    every = "all" in op._schema.name
    hits = over.sum(((x.filled(every) != 0) != every).to(torch.int32)) > 0
    result = ~hits if every else hits
    return Dense(result.to(torch.uint8) if x.dtype is torch.uint8 else result, segment_validity(over, x))


# --------------------------------------------------------------------------------------------------------- variance


@lowers_by_segments(reductions.var, reductions.std, reductions.var_mean, reductions.std_mean)
def var(over: Segments, x: Dense, op: OpOverload, *, correction: Any = None) -> Any:
    if not is_inexact(x.dtype) or isinstance(correction, complex):
        raise NotLowered("torch refuses it")
    m = moments(x, over)
    spread = Dense(variance(m, correction).to(x.dtype.to_real()), m.exists)
    name = op._schema.name
    spread = safe_sqrt(spread) if "std" in name else spread
    return (spread, Dense(m.mean.to(x.dtype), m.exists)) if "mean" in name else spread


# -------------------------------------------------------------------------------------------------------- extremum


@lowers_by_segments(reductions.amax, reductions.aminmax)
def amax(over: Segments, x: Dense, op: OpOverload) -> Any:
    if x.dtype.is_complex or x.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        raise NotLowered(f"torch has no extremum by segments of {x.dtype}")
    name = op._schema.name.partition("::")[2]
    if name == "aminmax":
        return extremum(over, x, aten.amin.default), extremum(over, x, aten.amax.default)
    return extremum(over, x, aten.amax.default if "max" in name else aten.amin.default)


def extremum(over: Segments, x: Dense, op: OpOverload) -> Dense:
    """As reductions.extremum: the mean of the valid elements that equal the greatest (least), with its derivative."""
    word = op._schema.name.partition("::")[2]
    seen = Dense(x.data.detach(), x.validity).filled(identity_of(op, x.dtype))
    peak = over.extremum(seen, word)
    there = segment_validity(over, x)
    if not (x.dtype.is_floating_point and gradients_may_flow(x.data)):
        return Dense(peak, there)
    ties = as_int8(Dense((seen == over.spread(peak)) | (seen != seen), x.validity).filled(False))
    base = torch.where(peak.isinf(), 0, peak)
    rest = over.sum(Dense(x.data - over.spread(base), ties).filled(0))
    shares = nonzero_count(over.count(Dense(x.data, ties)))
    return Dense((base + rest / shares).to(x.dtype), there)


# ------------------------------------------------------------------------------------------------------ exponentials


@lowers_by_segments(reductions.logsumexp)
def logsumexp(over: Segments, x: Dense, op: OpOverload) -> Dense:
    x = x if is_inexact(x.dtype) else x.like(x.data.to(torch.get_default_dtype()))
    if x.dtype.is_complex:
        raise NotLowered("complex numbers have no greatest")
    wide, peak, _ = segment_exponentials(over, x)
    base = torch.where(peak.isinf(), 0, peak)
    apart = Dense(wide.data - over.spread(base), wide.validity)
    total = over.sum(Dense(apart.filled(0).exp(), x.validity).filled(0))
    some = as_bool(segment_validity(over, x))
    # Of -inf alone: the result is -inf, and its derivative that of the sum, 0.
    none = some & (peak == -math.inf)
    logarithm = torch.where(none, total - math.inf, torch.where(some & ~none, total, 1).log())
    return Dense((logarithm + base).to(x.dtype), as_int8(some))


# ------------------------------------------------------------------------------------------------------------ norms


@lowers_by_segments(reductions.linalg_vector_norm, reductions.norm)
def vector_norm(
    over: Segments, x: Dense, op: OpOverload, *, ord: Any = 2, p: Any = 2, dtype: torch.dtype | None = None
) -> Dense:
    order = float(2 if (ord if p == 2 else p) is None else (ord if p == 2 else p))
    if order not in (1.0, 2.0, math.inf) or x.dtype is torch.complex32 or not is_inexact(x.dtype) or dtype is not None:
        raise NotLowered(f"no norm of order {order} by segments")
    filled = x.filled(0)
    wide = filled.to(accumulation_dtype(x.dtype))
    there = segment_validity(over, x)
    real = x.dtype.to_real()
    if order == 2:
        return Dense(safe_sqrt(Dense(over.sum(abs_squared(wide)))).data.to(real), there)
    if order == 1:
        return Dense(over.sum(wide.abs()).to(real), there)
    return extremum(over, Dense(filled.abs(), x.validity), aten.amax.default)


@reductions.dist.lowering(Sparse)
def dist(op: OpOverload, x: Any, y: Any, p: float = 2) -> Any:
    return distance(x, y, p, None)
