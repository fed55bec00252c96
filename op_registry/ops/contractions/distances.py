"""Distances between vectors: cosine_similarity, cdist, pdist; pairwise_distance decomposes, dist is with the norms.

Law: over the coordinates that are valid in both vectors; valid where there is at least one such coordinate, or where
the vectors have no coordinates at all. Other coordinates contribute nothing: they are filled with 0 after subtracting.
Two vectors without a common coordinate are filled with ones, where all norms and cosines have finite derivatives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    REDUCTION,
    Dense,
    as_bool,
    as_int8,
    fill_where_invalid,
    intersect,
    masked_slices,
    upcast_under_autocast,
    valid_in_all,
)

aten = torch.ops.aten


@masked_slices(aten.cosine_similarity, category=REDUCTION)
def cosine_similarity(op: OpOverload, x: Dense, y: Dense, dim: int = 1, eps: float = 1e-8) -> Dense:
    """The norms of both vectors are taken over the common coordinates, too."""
    left, right = torch.broadcast_tensors(x.data, y.data)
    joint = valid_in_all(x, y)
    assert joint is not None
    pairs = Dense(left, joint.expand(left.shape))
    if left.numel() == 0:
        return Dense(op(left, right, dim, eps))
    has_common = pairs.any_valid(dim, keepdim=True)
    left, right = (fill_where_invalid(t, pairs.validity, 0) for t in (left, right))
    similarity = op(fill_where_invalid(left, has_common, 1), fill_where_invalid(right, has_common, 1), dim, eps)
    return Dense(similarity, pairs.any_valid(dim))


@masked_slices(aten.cdist, aten._cdist_forward, category=REDUCTION)
def cdist(op: OpOverload, x: Dense, y: Dense, p: float = 2.0, compute_mode: int | None = None) -> Dense:
    """Between every row of `x` and every row of `y`."""
    result = op(x.data.detach(), y.data.detach(), p, compute_mode)  # its dtype, and torch's errors
    return all_pair_distances(x, y, p, result)


@masked_slices(aten._euclidean_dist, category=REDUCTION)
def _euclidean_dist(op: OpOverload, x: Dense, y: Dense) -> Dense:
    """torch's cdist by matrix products; not here, because each pair has its own set of coordinates."""
    return all_pair_distances(x, y, 2.0, op(x.data.detach(), y.data.detach()))


@masked_slices(aten.pdist, aten._pdist_forward, category=REDUCTION)
def pdist(op: OpOverload, x: Dense, p: float = 2.0) -> Dense:
    """Between any two rows, in the order of the upper triangle."""
    result = op(x.data.detach(), p)  # its dtype, and torch's errors
    rows, others = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return pair_distances(
        x.map(lambda t: t.index_select(0, rows)), x.map(lambda t: t.index_select(0, others)), p, result
    )


def all_pair_distances(x: Dense, y: Dense, p: float, result: Tensor) -> Dense:
    return pair_distances(x.map(lambda t: t.unsqueeze(-2)), y.map(lambda t: t.unsqueeze(-3)), p, result)


def pair_distances(x: Dense, y: Dense, p: float, result: Tensor) -> Dense:
    """The norm of the differences along the last dimension, in the dtype of `result`."""
    difference = upcast_under_autocast(x.data) - upcast_under_autocast(y.data)
    joint = intersect(x.validity, y.validity)
    assert joint is not None
    differences = Dense(difference, as_int8(joint).expand(difference.shape))
    has_common = differences.any_valid(-1, keepdim=True)
    assert has_common is not None
    # The fill is 0 for pairs with a common coordinate, and 1 for the others.
    filled = differences.filled(torch.where(as_bool(has_common), 0, 1).to(difference.dtype))
    distance = torch.linalg.vector_norm(filled, p, -1).to(result.dtype)
    return Dense(distance, has_common.squeeze(-1))
