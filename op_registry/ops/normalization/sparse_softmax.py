"""Softmax on sparse storage, by segment reductions over the stored elements."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Segments, autocast_on, lowers_by_segments, segment_exponentials
from op_registry.ops.normalization import softmax as softmax_rules


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
