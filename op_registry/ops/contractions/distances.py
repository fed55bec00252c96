"""Distances between vectors: cosine_similarity, cdist, pdist; pairwise_distance decomposes, dist stands with the norms.

Law: over the coordinates that are valid in both vectors; valid where there is at least one such coordinate, or none to
begin with. A coordinate that one of the two lacks is no difference: it is filled with 0 after subtracting. Two vectors
without a common coordinate are filled with ones, where norms and cosines of every order have finite derivatives.
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
    """Both vectors' lengths, too, are those over the common coordinates."""
    left, right = torch.broadcast_tensors(x.data, y.data)
    joint = valid_in_all(x, y)
    assert joint is not None
    pairs = Dense(left, joint.expand(left.shape))
    if left.numel() == 0:
        return Dense(op(left, right, dim, eps))
    some = pairs.any_valid(dim, keepdim=True)
    common, other = (fill_where_invalid(t, pairs.validity, 0) for t in (left, right))
    similarity = op(fill_where_invalid(common, some, 1), fill_where_invalid(other, some, 1), dim, eps)
    return Dense(similarity, pairs.any_valid(dim))


@masked_slices(aten.cdist, aten._cdist_forward, category=REDUCTION)
def cdist(op: OpOverload, x: Dense, y: Dense, p: float = 2.0, compute_mode: int | None = None) -> Dense:
    """Between every row of one and every row of the other."""
    result = op(x.data.detach(), y.data.detach(), p, compute_mode)  # its dtype, and torch's errors
    return from_all_to_all(x, y, p, result)


@masked_slices(aten._euclidean_dist, category=REDUCTION)
def _euclidean_dist(op: OpOverload, x: Dense, y: Dense) -> Dense:
    """cdist by matrix products; not so here, where each pair has coordinates of its own."""
    return from_all_to_all(x, y, 2.0, op(x.data.detach(), y.data.detach()))


@masked_slices(aten.pdist, aten._pdist_forward, category=REDUCTION)
def pdist(op: OpOverload, x: Dense, p: float = 2.0) -> Dense:
    """Between every two rows, in the order of the upper triangle."""
    result = op(x.data.detach(), p)  # its dtype, and torch's errors
    rows, others = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return length(x.map(lambda t: t.index_select(0, rows)), x.map(lambda t: t.index_select(0, others)), p, result)


def from_all_to_all(x: Dense, y: Dense, p: float, result: Tensor) -> Dense:
    return length(x.map(lambda t: t.unsqueeze(-2)), y.map(lambda t: t.unsqueeze(-3)), p, result)


def length(x: Dense, y: Dense, p: float, result: Tensor) -> Dense:
    """The norm of the differences along the last dimension, of the dtype of `result`."""
    difference = upcast_under_autocast(x.data) - upcast_under_autocast(y.data)
    both = intersect(x.validity, y.validity)
    assert both is not None
    apart = Dense(difference, as_int8(both).expand(difference.shape))
    some = apart.any_valid(-1, keepdim=True)
    assert some is not None
    # Where a coordinate is common the fill is 0, and 1 where none is.
    coordinates = apart.filled(torch.where(as_bool(some), 0, 1).to(difference.dtype))
    distance = torch.linalg.vector_norm(coordinates, p, -1).to(result.dtype)
    return Dense(distance, some.squeeze(-1))
