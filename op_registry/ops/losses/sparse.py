"""Losses on sparse storage, composed of other sparse operators and lookups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import (
    Bound,
    Dense,
    NotLowered,
    Sparse,
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
from op_registry.ops.losses.classification import Labels, class_dim, reduced_over_rows, weighted_rows
from op_registry.ops.losses.rules import reduced

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
    """The stored element at each row's class, in place of torch's kernel."""
    raise_error_of_torch(c)
    x, c = c.self, c.with_(target=to_dense(c.target))  # one value per row
    dim, rows = class_dim(x), list(grid_coordinates(c.target.shape, x.device)) if c.target.ndim else []
    at_class = Dense(torch.zeros((), dtype=x.dtype, device=x.device))

    def valid_at(classes: Tensor) -> Tensor | None:
        nonlocal at_class
        labels = classes.reshape(-1)
        refused = (labels != c.ignore_index) & ((labels < 0) | (labels >= x.shape[dim]))
        first = labels[refused.to(torch.int8).argmax().reshape(1)]  # one that is out of range, if there is one
        aten.nll_loss(torch.zeros((1, x.shape[dim]), dtype=x.dtype, device=x.device), first)  # raises torch's error
        index = classes.to(torch.int64).clamp(0, x.shape[dim] - 1).reshape(-1)
        at_class = lookup(x, [*rows[:dim], index, *rows[dim:]]).map(lambda t: t.reshape(classes.shape))
        return at_class.validity

    labels = Labels(c, valid_at)
    losses = torch.where(labels.classes != c.ignore_index, -at_class.data, 0)
    return reduced_over_rows(c, weighted_rows(c, losses, labels), labels)


@on_call(sparse="self", only=(("label_smoothing", 0.0),))
def cross_entropy_loss(c: Bound) -> Any:
    if c.target.dtype.is_floating_point:
        raise NotLowered("its target has probabilities of classes")
    logp = call(aten.log_softmax.int, c.self, 1 if c.self.ndim > 1 else 0)
    return call(aten.nll_loss_nd.default, logp, c.target, c.weight, c.reduction, c.ignore_index)
