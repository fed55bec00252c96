"""Losses on sparse storage, composed of operators that keep elements where they are stored."""

from __future__ import annotations

from typing import Any

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
    dense_or_none,
    distance,
    grid_coordinates,
    intersect,
    joint_sums,
    lookup,
    refuse_permuted,
    valid_in_all,
)
from op_registry.ops.losses import rules as losses
from op_registry.ops.losses.rules import MEAN, NONE, SUM, reduced

aten = torch.ops.aten


@losses.cosine_embedding_loss.lowering(Sparse)
def cosine_embedding_loss(
    op: OpOverload, input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: int = MEAN
) -> Any:
    product, mine, theirs = joint_sums(input1, input2, -1)
    target = dense_or_none(target)  # one for each row
    epsilon = 1e-12
    cosine = product.data / ((mine.data + epsilon) * (theirs.data + epsilon)).sqrt()
    signs = target.filled(1)
    if signs.ndim != cosine.ndim:
        raise NotLowered("torch refuses the target")
    each = torch.where(signs == 1, 1 - cosine, torch.where(signs == -1, (cosine - margin).clamp_min(0), 0))
    return reduced(Dense(each, intersect(product.full_validity, target.full_validity)), reduction)


@losses.triplet_margin_loss.lowering(Sparse)
def triplet_margin_loss(
    op: OpOverload,
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Any:
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
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Dense:
    """What is stored at each row's class; the sum and its denominator as classification.py has them."""
    refuse_permuted(self, target, weight)
    if not isinstance(self, Sparse) or isinstance(weight, Sparse) or target.dtype.is_floating_point:
        raise NotLowered("the input is stored densely, or the weight is sparse, or torch refuses the target")
    if not self.dtype.is_floating_point:
        raise NotLowered("torch refuses its dtype")
    dim = 1 if self.ndim > 1 else 0
    classes = self.shape[dim]
    if tuple(target.shape) != tuple(n for d, n in enumerate(self.shape) if d != dim) or 0 in self.shape:
        raise NotLowered("the shapes don't fit, or there is nothing in it")
    if weight is not None and tuple(weight.shape) != (classes,):
        raise NotLowered("torch refuses the weight")
    if being_traced(self.values.data):
        raise NotLowered("a graph cannot ask whether a label is none of the classes")
    labels = dense_or_none(target).map(lambda t: t.reshape(-1))  # one for each row
    given = labels.filled(ignore_index).to(torch.int64)
    ignored = given == ignore_index
    wrong = (~ignored & ((given < 0) | (given >= classes))).nonzero()[:1, 0]
    if wrong.shape[0]:
        aten.nll_loss(torch.zeros((1, classes), device=self.device), given[wrong])  # raises torch's error
    safe = given.clamp(0, classes - 1)
    rows = list(grid_coordinates(target.shape, self.device)) if target.ndim else []
    found = lookup(self, [*rows[:dim], safe, *rows[dim:]])
    weights = None if weight is None else weight.map(lambda t: t.index_select(0, safe))
    present = valid_in_all(found, weights)
    read = as_bool(present) if present is not None else torch.ones_like(ignored)
    counted = read & ~ignored
    w = torch.ones((), dtype=self.dtype, device=self.device) if weights is None else weights.filled(1)
    each = torch.where(counted, -torch.where(counted, found.data, 0) * w, 0)
    valid = read | ignored
    if labels.valid is not None:
        valid = valid & labels.valid
    if reduction == NONE:
        return Dense(each, as_int8(valid)).map(lambda t: t.reshape(target.shape))
    total, some = each.sum(), valid.any()
    if reduction == SUM:
        return Dense(total, as_int8(some))
    share = torch.where(counted, w, 0).sum().to(total.dtype)
    # Nothing valid gives an invalid 0; none but ignored rows are torch's 0/0.
    return Dense(total / torch.where(some, share, 1), as_int8(some))


def cross_entropy_loss(
    op: OpOverload,
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Dense:
    if label_smoothing != 0 or not isinstance(self, Sparse):
        raise NotLowered("labels are smoothed, or the input is stored densely")
    logs = call(aten.log_softmax.int, self, 1 if self.ndim > 1 else 0)
    return nll_loss(aten.nll_loss_nd.default, logs, target, weight, reduction, ignore_index)
