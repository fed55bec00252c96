"""glu along a dense dimension of hybrid storage."""

from __future__ import annotations

from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse, rows_of
from op_registry.ops.elementwise import activations


def glu(op: OpOverload, self: Dense | Sparse, dim: int = -1) -> Sparse:
    """One half of a dense dimension, gated by the other."""
    x = rows_of(self)
    dense_dim = (dim + x.ndim if dim < 0 else dim) - x.pattern.ndim
    if not 0 <= dense_dim < len(x.dense_sizes):
        raise NotLowered("it works along a sparse dimension")
    return x.like(activations.glu.run(x.values, dense_dim + x.pattern.lead))
