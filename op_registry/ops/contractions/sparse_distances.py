"""Distances on sparse storage: norms of the differences between the elements that both operands store."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse, call, safe_sqrt
from op_registry.ops.contractions import distances
from op_registry.sparse.on_values import distance, joint_sums, refuse_permuted

aten = torch.ops.aten


@distances.cdist.lowering(Sparse)
def cdist(
    op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, p: float = 2.0, compute_mode: int | None = None
) -> Dense:
    refuse_permuted(x, y)
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-1] or 0 in (*x.shape, *y.shape) or p < 0:
        raise NotLowered("torch refuses it, or it is empty")
    rows, columns = call(aten.unsqueeze.default, x, -2), call(aten.unsqueeze.default, y, -3)
    return distance(rows, columns, p, [-1])


@distances.pdist.lowering(Sparse)
def pdist(op: OpOverload, x: Dense | Sparse, p: float = 2.0) -> Dense:
    if x.ndim != 2 or x.shape[0] < 2 or x.shape[1] == 0 or p < 0:
        raise NotLowered("torch refuses it, or it is empty")
    pairs = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    rows, others = (call(aten.index_select.default, x, 0, Dense(i)) for i in pairs)
    return distance(rows, others, p, [-1])


@distances.cosine_similarity.lowering(Sparse)
def cosine_similarity(op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, dim: int = 1, eps: float = 1e-8) -> Dense:
    product, x_squared, y_squared = joint_sums(x, y, dim)
    norms = safe_sqrt(x_squared.data).clamp_min(eps) * safe_sqrt(y_squared.data).clamp_min(eps)
    return Dense(product.data / norms, product.validity)
