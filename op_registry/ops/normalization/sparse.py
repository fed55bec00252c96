"""softmax and renorm on sparse storage; norms are written on slices, and need no lowering of their own.

Law: that of softmax.py and norms.py, over the valid stored elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse, autocast_on, call, to_dense
from op_registry.ops.normalization import norms
from op_registry.ops.normalization import softmax as softmax_rules
from op_registry.sparse.convert import with_coordinates
from op_registry.sparse.coordinates import unique_keys
from op_registry.sparse.layout import COO
from op_registry.sparse.segments import Segments, few_of, segment_exponentials
from op_registry.sparse.slicewise import lowers_by_segments

aten = torch.ops.aten


# torch's kernel, which runs on dense slices, is one pass; this takes four.
@lowers_by_segments(softmax_rules.softmax, softmax_rules._softmax)
def softmax(
    op: OpOverload, over: Segments, x: Dense, dtype: torch.dtype | None = None, half_to_float: bool = False
) -> Tensor:
    name = op._schema.name
    if not (dtype or x.dtype).is_floating_point or "safe" in name:
        raise NotLowered("torch refuses it, or it is _safe_softmax")
    result = dtype or (torch.float32 if half_to_float or autocast_on(x.device) else x.dtype)
    x, _, peak = segment_exponentials(over, x.like(x.data.to(dtype or x.dtype)))
    shifted = Dense(x.data - peak, x.validity)
    exponentials = Dense(shifted.filled(0).exp(), x.validity).filled(0)
    total = over.sum(exponentials)
    total = torch.where(total == 0, 1, total)  # 0 only if nothing in the slice is valid; else at least 1, or NaN
    if "log" in name:
        return (shifted.filled(0) - over.broadcast_to_elements(total.log())).to(result)
    return (exponentials / over.broadcast_to_elements(total)).to(result)


@norms.renorm.lowering(Sparse)
def renorm(op: OpOverload, x: Dense | Sparse, p: float, dim: int, maxnorm: float) -> Any:
    op(torch.empty([1] * x.ndim, dtype=x.dtype, device="meta"), p, dim, maxnorm)  # raises torch's errors
    if x.ndim < 2 or 0 in x.shape:
        raise NotLowered("it has one dimension, or is empty")
    dim = dim % x.ndim
    if isinstance(x, Sparse) and x.pattern.layout is COO and dim < x.pattern.ndim and few_of(x.shape[dim], x.pattern):
        slices, position = unique_keys(x.pattern.coordinates()[dim], x.shape[dim])
        own = [position if d == dim else c for d, c in enumerate(x.pattern.coordinates())]
        sizes = [len(slices) if d == dim else n for d, n in enumerate(x.pattern.sizes)]
        return x.like(call(op, with_coordinates(x, own, x.values, sizes), p, dim, maxnorm).values)
    norm = to_dense(call(aten.linalg_vector_norm.default, x, p, [d for d in range(x.ndim) if d != dim])).filled(0)
    factor = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1).to(x.dtype.to_real())
    factor = factor.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return call(aten.mul.Tensor, x, Dense(factor))
