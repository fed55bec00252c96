"""glu along a dense dimension of hybrid storage."""

from __future__ import annotations

from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse, rows_of, wrap_dim
from op_registry.ops.elementwise import activations


def glu(op: OpOverload, self: Dense | Sparse, dim: int = -1) -> Sparse:
    """One half of a dense dimension, gated by the other."""
    x = rows_of(self)
    dense_dim = wrap_dim(dim, x.ndim) - x.pattern.ndim
    if dense_dim < 0:
        raise NotLowered("it works along a sparse dimension")
    return x.like(activations.glu.run(x.values, dense_dim + x.pattern.lead))
