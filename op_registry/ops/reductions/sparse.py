"""Reductions on sparse storage, as segment reductions.

Law: that of rules.py; elements that are not stored are invalid and take no part. Each reduction is written in the sum
and the extremum of the stored elements of a slice (op_registry/sparse/segments.py), which take one pass over the stored
elements and can be compiled. Other operators and calls run on padded rows (op_registry/sparse/segments.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse, accumulation_dtype, as_bool, safe_sqrt
from op_registry.ops.reductions import rules as reductions
from op_registry.records.slices import Over, abs_squared, extremum, is_inexact
from op_registry.sparse.on_values import distance
from op_registry.sparse.segments import Segments, segment_exponentials
from op_registry.sparse.slicewise import lowers_by_segments

# ----------------------------------------------------------------------------------------------------------------- sums


@lowers_by_segments(reductions.sum, reductions.nansum)
def sum(op: OpOverload, over: Over, x: Dense, dtype: torch.dtype | None = None) -> Tensor:
    data = x.filled(0)
    result = dtype or (x.dtype if is_inexact(x.dtype) else torch.int64)
    if op._schema.name == "aten::nansum" and x.dtype.is_floating_point:
        data = data.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    if is_inexact(x.dtype) and not is_inexact(result):
        raise NotLowered("torch sums in the wider dtype")
    return over.sum(data, accumulation_dtype(result)).to(result)


@lowers_by_segments(reductions.any, reductions.all, reductions.any_all_dims)
def any_all(op: OpOverload, over: Over, x: Dense) -> Tensor:
    is_all = "all" in op._schema.name
    decided = over.sum((x.filled(is_all) != 0) != is_all, torch.int32) > 0
    result = ~decided if is_all else decided
    return result.to(torch.uint8) if x.dtype is torch.uint8 else result


# torch's logsumexp and norms are faster than these on dense slices: one pass, or one kernel for all exponentials.
@lowers_by_segments(reductions.logsumexp)
def logsumexp(op: OpOverload, over: Segments, x: Dense) -> Tensor:
    x = x if is_inexact(x.dtype) else x.like(x.data.to(torch.get_default_dtype()))
    wide, peak, _ = segment_exponentials(over, x)
    base = torch.where(peak.isinf(), 0, peak)
    shifted = Dense(wide.data - over.broadcast_to_elements(base), wide.validity)
    total = over.sum(Dense(shifted.filled(0).exp(), x.validity).filled(0))
    exists = as_bool(over.exists(x))
    # A slice of -inf only: the result is -inf, and its derivative that of the sum, 0.
    all_minus_inf = exists & (peak == -math.inf)
    logarithm = torch.where(all_minus_inf, total - math.inf, torch.where(exists & ~all_minus_inf, total, 1).log())
    return (logarithm + base).to(x.dtype)


@lowers_by_segments(reductions.linalg_vector_norm, reductions.norm)
def vector_norm(
    op: OpOverload,
    over: Over,
    x: Dense,
    ord: float | None = 2,  # of linalg_vector_norm
    p: float | None = 2,  # of norm
    dtype: torch.dtype | None = None,
) -> Tensor:
    asked = ord if p == 2 else p
    order = 2.0 if asked is None else float(asked)
    if order not in (1.0, 2.0, math.inf) or x.dtype is torch.complex32 or not is_inexact(x.dtype) or dtype is not None:
        raise NotLowered(f"there is no segment norm of order {order}, or the dtypes differ")
    if order == math.inf:
        return extremum(x.like(x.filled(0).abs()), over, "amax")
    wide = x.filled(0).to(accumulation_dtype(x.dtype))
    total = over.sum(abs_squared(wide) if order == 2 else wide.abs())
    return (safe_sqrt(total) if order == 2 else total).to(x.dtype.to_real())


@reductions.dist.lowering(Sparse)
def dist(op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, p: float = 2) -> Dense:
    return distance(x, y, p, None)
