"""Softmax on sparse storage, by segments of stored elements."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Segments, autocast_on, lowers_by_segments, segment_exponentials
from op_registry.ops.normalization import softmax as softmax_rules


@lowers_by_segments(softmax_rules.softmax, softmax_rules._softmax)
def softmax(over: Segments, x: Dense, op: OpOverload, *, dtype: Any = None, half_to_float: bool = False) -> Dense:
    name = op._schema.name
    if not (dtype or x.dtype).is_floating_point or "safe" in name:
        raise NotLowered("torch refuses it, or treats it in a way of its own")
    result = dtype or (torch.float32 if half_to_float or autocast_on(x.device) else x.dtype)
    x, _, peak = segment_exponentials(over, x.like(x.data.to(dtype or x.dtype)))
    apart = Dense(x.data - peak, x.validity)
    powers = Dense(apart.filled(0).exp(), x.validity).filled(0)
    total = over.sum(powers)
    total = torch.where(total == 0, 1, total)  # of a slice of which nothing is valid; else it is at least 1, or NaN
    if "log" in name:
        return x.like((apart.filled(0) - over.spread(total.log())).to(result))
    return x.like((powers / over.spread(total)).to(result))
