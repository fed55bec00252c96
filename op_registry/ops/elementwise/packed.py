"""Elementwise operators along a dense dimension of hybrid storage."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from op_registry.authoring import NotLowered, rows_of
from op_registry.ops.elementwise import activations


def glu(op: OpOverload, self: Any, dim: int = -1) -> Any:
    """One half of a dense dimension, gated by the other."""
    x = rows_of(self)
    inside = (dim + x.ndim if dim < 0 else dim) - x.pattern.ndim
    if not 0 <= inside < len(x.dense_sizes):
        raise NotLowered("it works along a sparse dimension")
    return x.like(activations.glu.run(x.values, inside + x.pattern.lead))
