"""Distances between vectors: cosine_similarity, cdist, pdist; pairwise_distance decomposes, dist is with the norms.

Law: over the coordinates that are valid in both vectors; valid where there is at least one such coordinate, or where
the vectors have no coordinates at all. Other coordinates contribute nothing: they are filled with 0 after subtracting.
Two vectors without a common coordinate are filled with ones, where all norms and cosines have finite derivatives.

No temporary of the size (rows · rows · coordinates) is made: Euclidean distances are matrix products where torch's own
are, and other pairs are taken some at a time. (A derivative of the latter keeps all differences, and a compiler fuses
them.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    REDUCTION,
    Along,
    Dense,
    Equation,
    as_bool,
    as_int8,
    fill_where_invalid,
    gradients_may_flow,
    intersect,
    masked_slices,
    safe_sqrt,
    valid_in_all,
)
from op_registry.autocast import autocast_off, upcast_under_autocast
from op_registry.records.layout import concatenated, full_mask
from op_registry.records.tracing import computed_at_once

aten = torch.ops.aten

# Rows of two matrices; the result has a distance for each pair of rows.
PAIRS = Equation("*md,*nd->*mn")


@masked_slices(aten.cosine_similarity, category=REDUCTION, dims=Along("reduced"))
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


@masked_slices(aten.cdist, aten._cdist_forward, category=REDUCTION, dims=PAIRS)
def cdist(op: OpOverload, x: Dense, y: Dense, p: float = 2.0, compute_mode: int | None = None) -> Dense:
    """Between every row of `x` and every row of `y`."""
    dtype = op(no_rows(x), y.data.detach(), p, compute_mode).dtype  # and torch's errors
    if p == 2 and (compute_mode == _ALWAYS_PRODUCTS or (compute_mode in _PRODUCTS_IF_LARGE and is_large(x, y))):
        return euclidean_distances(x, y, dtype)
    return all_pair_distances(x, y, p, dtype)


def no_rows(x: Dense) -> Tensor:
    """An operand from which torch computes nothing, but what it would refuse."""
    data = x.data.detach()
    return data.narrow(-2, 0, 0) if data.ndim > 1 else data


# torch's compute modes: "use_mm_for_euclid_dist", and "use_mm_for_euclid_dist_if_necessary", the default.
_ALWAYS_PRODUCTS, _PRODUCTS_IF_LARGE = 1, (None, 0)
# The most elements of a temporary of differences.
_AT_ONCE = 2**21


def is_large(x: Dense, y: Dense) -> bool:
    """Whether torch computes Euclidean distances of that many rows by matrix products."""
    return computed_at_once(x.data, y.data) and max(x.shape[-2], y.shape[-2]) > 25


@masked_slices(aten._euclidean_dist, category=REDUCTION, dims=PAIRS)
def _euclidean_dist(op: OpOverload, x: Dense, y: Dense) -> Dense:
    """torch's cdist by matrix products."""
    return euclidean_distances(x, y, op(no_rows(x), y.data.detach()).dtype)


def euclidean_distances(x: Dense, y: Dense, dtype_of_result: torch.dtype) -> Dense:
    """By Σ(x - y)² = Σx² + Σy² - 2Σxy, each a matrix product over common coordinates, as torch computes them.

    A number without a finite square would make 0 · inf of a coordinate that is not common, and is subtracted first.
    """
    dtype = upcast_under_autocast(x.data).dtype
    left, right = (upcast_under_autocast(record.filled(0)) for record in (x, y))
    squares, others = left * left, right * right
    if not computed_at_once(left, right) or left.device.type == "meta" or not are_finite(squares, others):
        return all_pair_distances(x, y, 2.0, dtype_of_result)
    in_x, in_y = (full_mask(record).to(dtype) for record in (x, y))
    with autocast_off(left.device):
        has_common = as_int8(in_x @ in_y.mT > 0)
        if gradients_may_flow(left, right):
            spread = squares @ in_y.mT + in_x @ others.mT - 2 * (left @ right.mT)
            return Dense(safe_sqrt(spread.clamp_min(0)).to(dtype_of_result), has_common)
        # In place: each of these is as large as the result.
        spread = squares @ in_y.mT
        spread.add_(in_x @ others.mT)
        spread.sub_(left @ right.mT, alpha=2)
    return Dense(spread.clamp_min_(0).sqrt_().to(dtype_of_result), has_common)


def are_finite(*tensors: Tensor) -> bool:
    return all(bool(t.detach().isfinite().all()) for t in tensors)


@masked_slices(aten.pdist, aten._pdist_forward, category=REDUCTION, dims=Equation("Nd->P"))
def pdist(op: OpOverload, x: Dense, p: float = 2.0) -> Dense:
    """Between any two rows, in the order of the upper triangle."""
    dtype = op(x.data.detach(), p).dtype  # and torch's errors
    rows, others = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    at_once = max(1, _AT_ONCE // max(1, x.shape[1]))
    if not computed_at_once(x.data) or rows.shape[0] <= at_once:
        return distances_of(x, rows, others, p, dtype)
    pairs = zip(rows.split(at_once), others.split(at_once), strict=True)
    return concatenated([distances_of(x, one, other, p, dtype) for one, other in pairs], 0)


def distances_of(x: Dense, rows: Tensor, others: Tensor, p: float, dtype: torch.dtype) -> Dense:
    """Between the rows of two lists of row numbers."""
    return pair_distances(
        x.map(lambda t: t.index_select(0, rows)), x.map(lambda t: t.index_select(0, others)), p, dtype
    )


def all_pair_distances(x: Dense, y: Dense, p: float, dtype: torch.dtype) -> Dense:
    """Between every row of `x` and every row of `y`, some rows of `x` at a time."""
    columns = y.map(lambda t: t.unsqueeze(-3))
    per_row = math.prod(torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])) * y.shape[-2] * x.shape[-1]
    at_once = max(1, _AT_ONCE // max(1, per_row))
    if not computed_at_once(x.data, y.data) or x.shape[-2] <= at_once:
        return pair_distances(x.map(lambda t: t.unsqueeze(-2)), columns, p, dtype)
    pieces = [
        pair_distances(some_rows(x, start, at_once), columns, p, dtype) for start in range(0, x.shape[-2], at_once)
    ]
    return concatenated(pieces, -2)


def some_rows(x: Dense, start: int, count: int) -> Dense:
    """`count` rows from `start`, in a dimension of their own; of a validity that is broadcast over rows, the one."""
    return x.map(lambda t: (t if t.shape[-2] == 1 else t[..., start : start + count, :]).unsqueeze(-2))


def pair_distances(x: Dense, y: Dense, p: float, dtype: torch.dtype) -> Dense:
    """The norm of the differences along the last dimension."""
    difference = upcast_under_autocast(x.data) - upcast_under_autocast(y.data)
    joint = intersect(x.validity, y.validity)
    assert joint is not None
    differences = Dense(difference, as_int8(joint).expand(difference.shape))
    has_common = differences.any_valid(-1, keepdim=True)
    assert has_common is not None
    # The fill is 0 for pairs with a common coordinate, and 1 for the others.
    filled = differences.filled(torch.where(as_bool(has_common), 0, 1).to(difference.dtype))
    distance = torch.linalg.vector_norm(filled, p, -1).to(dtype)
    return Dense(distance, has_common.squeeze(-1))
