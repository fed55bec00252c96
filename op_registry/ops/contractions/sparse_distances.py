"""Distances on sparse storage: norms of the differences of what both operands store."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Sparse, call, distance, joint_sums, refuse_permuted, safe_sqrt
from op_registry.ops.contractions import distances

aten = torch.ops.aten


@distances.cdist.lowering(Sparse)
def cdist(op: OpOverload, x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    refuse_permuted(x, y)
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-1] or 0 in (*x.shape, *y.shape) or p < 0:
        raise NotLowered("torch refuses it, or there is nothing in it")
    rows, others = call(aten.unsqueeze.default, x, -2), call(aten.unsqueeze.default, y, -3)
    return distance(rows, others, p, [-1])


@distances.pdist.lowering(Sparse)
def pdist(op: OpOverload, x: Any, p: float = 2.0) -> Any:
    if x.ndim != 2 or x.shape[0] < 2 or x.shape[1] == 0 or p < 0:
        raise NotLowered("torch refuses it, or there is nothing in it")
    pairs = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    rows, others = (call(aten.index_select.default, x, 0, Dense(i)) for i in pairs)
    return distance(rows, others, p, [-1])


@distances.cosine_similarity.lowering(Sparse)
def cosine_similarity(op: OpOverload, x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    product, mine, theirs = joint_sums(x, y, dim)
    lengths = safe_sqrt(Dense(mine.data)).data.clamp_min(eps) * safe_sqrt(Dense(theirs.data)).data.clamp_min(eps)
    return Dense(product.data / lengths, product.validity)
