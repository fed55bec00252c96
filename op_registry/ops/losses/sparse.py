"""Losses on sparse storage, composed of other sparse operators and lookups."""

from __future__ import annotations

from typing import Any

import torch

from op_registry.authoring import (
    Bound,
    Dense,
    NotLowered,
    Sparse,
    as_bool,
    as_int8,
    call,
    distance,
    grid_coordinates,
    intersect,
    joint_sums,
    lookup,
    on_call,
    raise_error_of_torch,
    to_dense,
    valid_in_all,
)
from op_registry.ops.losses import rules as losses
from op_registry.ops.losses.rules import NONE, SUM, reduced

aten = torch.ops.aten


@losses.cosine_embedding_loss.lowering(Sparse)
@on_call
def cosine_embedding_loss(c: Bound) -> Dense:
    raise_error_of_torch(c)
    product, squared1, squared2 = joint_sums(c.input1, c.input2, -1)
    target = to_dense(c.target)  # one value per row
    epsilon = 1e-12
    cosine = product.data / ((squared1.data + epsilon) * (squared2.data + epsilon)).sqrt()
    signs = target.filled(1)
    unreduced = torch.where(signs == 1, 1 - cosine, torch.where(signs == -1, (cosine - c.margin).clamp_min(0), 0))
    return reduced(Dense(unreduced, intersect(product.full_validity, target.full_validity)), c.reduction)


@losses.triplet_margin_loss.lowering(Sparse)
@on_call(one_ndim="anchor, positive, negative")
def triplet_margin_loss(c: Bound) -> Dense:
    to_positive = distance(c.anchor, c.positive, c.p, [-1], c.eps)
    to_negative = distance(c.anchor, c.negative, c.p, [-1], c.eps)
    nearest, validity = to_negative.data, valid_in_all(to_positive, to_negative)
    if c.swap:
        between = distance(c.positive, c.negative, c.p, [-1], c.eps)
        nearest, validity = torch.minimum(nearest, between.data), intersect(validity, between.validity)
    return reduced(Dense((c.margin + to_positive.data - nearest).clamp_min(0), validity), c.reduction)


@on_call(sparse="self", dense="weight", eager=True, elements=True)
def nll_loss(c: Bound) -> Dense:
    """Look up the stored element at each row's class, then reduce as in classification.py."""
    raise_error_of_torch(c)
    self, target, weight, reduction, ignore_index = c.self, c.target, c.weight, c.reduction, c.ignore_index
    dim = 1 if self.ndim > 1 else 0
    classes = self.shape[dim]
    targets = to_dense(target).map(lambda t: t.reshape(-1))  # one value per row
    labels = targets.filled(ignore_index).to(torch.int64)
    ignored = labels == ignore_index
    out_of_range = (~ignored & ((labels < 0) | (labels >= classes))).nonzero()[:1, 0]
    one_row = torch.zeros((1, classes), dtype=self.dtype, device=self.device)
    aten.nll_loss(one_row, labels[out_of_range if len(out_of_range) else slice(1)])  # raises torch's error
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


@on_call(sparse="self", only=(("label_smoothing", 0.0),))
def cross_entropy_loss(c: Bound) -> Any:
    if c.target.dtype.is_floating_point:
        raise NotLowered("its target has probabilities of classes")
    logp = call(aten.log_softmax.int, c.self, 1 if c.self.ndim > 1 else 0)
    return call(aten.nll_loss_nd.default, logp, c.target, c.weight, c.reduction, c.ignore_index)
