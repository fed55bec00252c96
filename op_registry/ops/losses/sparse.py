"""Losses on sparse storage, composed of other sparse operators and lookups."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Sparse,
    as_bool,
    as_int8,
    being_traced,
    call,
    distance,
    grid_coordinates,
    intersect,
    joint_sums,
    lookup,
    refuse_permuted,
    to_dense,
    valid_in_all,
)
from op_registry.ops.losses import rules as losses
from op_registry.ops.losses.rules import MEAN, NONE, SUM, reduced

aten = torch.ops.aten


@losses.cosine_embedding_loss.lowering(Sparse)
def cosine_embedding_loss(
    op: OpOverload,
    input1: Dense | Sparse,
    input2: Dense | Sparse,
    target: Dense | Sparse,
    margin: float = 0.0,
    reduction: int = MEAN,
) -> Dense:
    product, squared1, squared2 = joint_sums(input1, input2, -1)
    target = to_dense(target)  # one value per row
    epsilon = 1e-12
    cosine = product.data / ((squared1.data + epsilon) * (squared2.data + epsilon)).sqrt()
    signs = target.filled(1)
    if signs.ndim != cosine.ndim:
        raise NotLowered("torch refuses the target")
    unreduced = torch.where(signs == 1, 1 - cosine, torch.where(signs == -1, (cosine - margin).clamp_min(0), 0))
    return reduced(Dense(unreduced, intersect(product.full_validity, target.full_validity)), reduction)


@losses.triplet_margin_loss.lowering(Sparse)
def triplet_margin_loss(
    op: OpOverload,
    anchor: Dense | Sparse,
    positive: Dense | Sparse,
    negative: Dense | Sparse,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Dense:
    if len({r.ndim for r in (anchor, positive, negative)}) > 1:
        raise NotLowered("torch refuses it")
    to_positive = distance(anchor, positive, p, [-1], eps)
    to_negative = distance(anchor, negative, p, [-1], eps)
    nearest, validity = to_negative.data, valid_in_all(to_positive, to_negative)
    if swap:
        between = distance(positive, negative, p, [-1], eps)
        nearest, validity = torch.minimum(nearest, between.data), intersect(validity, between.validity)
    return reduced(Dense((margin + to_positive.data - nearest).clamp_min(0), validity), reduction)


def nll_loss(
    op: OpOverload,
    self: Dense | Sparse,
    target: Dense | Sparse,
    weight: Dense | Sparse | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Dense:
    """Look up the stored element at each row's class, then reduce as in classification.py."""
    refuse_permuted(self, target, weight)
    if not isinstance(self, Sparse) or isinstance(weight, Sparse) or target.dtype.is_floating_point:
        raise NotLowered("the input is stored densely, the weight is sparse, or torch refuses the target")
    if not self.dtype.is_floating_point:
        raise NotLowered("torch refuses the dtype")
    dim = 1 if self.ndim > 1 else 0
    classes = self.shape[dim]
    if tuple(target.shape) != tuple(n for d, n in enumerate(self.shape) if d != dim) or 0 in self.shape:
        raise NotLowered("the shapes do not match, or it is empty")
    if weight is not None and tuple(weight.shape) != (classes,):
        raise NotLowered("torch refuses the weight")
    if being_traced(self.values.data):
        raise NotLowered("whether labels are in range is not known while tracing")
    targets = to_dense(target).map(lambda t: t.reshape(-1))  # one value per row
    labels = targets.filled(ignore_index).to(torch.int64)
    ignored = labels == ignore_index
    out_of_range = (~ignored & ((labels < 0) | (labels >= classes))).nonzero()[:1, 0]
    if out_of_range.shape[0]:
        aten.nll_loss(torch.zeros((1, classes), device=self.device), labels[out_of_range])  # raises torch's error
    index = labels.clamp(0, classes - 1)
    rows = list(grid_coordinates(target.shape, self.device)) if target.ndim else []
    at_label = lookup(self, [*rows[:dim], index, *rows[dim:]])
    weights = None if weight is None else weight.map(lambda t: t.index_select(0, index))
    validity = valid_in_all(at_label, weights)
    valid_at_label = as_bool(validity) if validity is not None else torch.ones_like(ignored)
    counted = valid_at_label & ~ignored
    w = torch.ones((), dtype=self.dtype, device=self.device) if weights is None else weights.filled(1)
    unreduced = torch.where(counted, -torch.where(counted, at_label.data, 0) * w, 0)
    valid = valid_at_label | ignored
    if targets.valid is not None:
        valid = valid & targets.valid
    if reduction == NONE:
        return Dense(unreduced, as_int8(valid)).map(lambda t: t.reshape(target.shape))
    total, exists = unreduced.sum(), valid.any()
    if reduction == SUM:
        return Dense(total, as_int8(exists))
    denominator = torch.where(counted, w, 0).sum().to(total.dtype)
    # Without valid rows an invalid 0; if all valid rows are ignored, torch's 0/0.
    return Dense(total / torch.where(exists, denominator, 1), as_int8(exists))


def cross_entropy_loss(
    op: OpOverload,
    self: Dense | Sparse,
    target: Dense | Sparse,
    weight: Dense | Sparse | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Dense:
    if label_smoothing != 0 or not isinstance(self, Sparse):
        raise NotLowered("labels are smoothed, or the input is stored densely")
    logp = call(aten.log_softmax.int, self, 1 if self.ndim > 1 else 0)
    return nll_loss(aten.nll_loss_nd.default, logp, target, weight, reduction, ignore_index)
