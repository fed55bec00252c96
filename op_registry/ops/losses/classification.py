"""Losses over classes.

Law: a row's loss is valid where its target, the input at the target's class and that class's weight are valid; rows
with ``ignore_index`` have torch's loss of 0, valid. A softmax inside a loss runs over the valid classes of the row; a
mean over classes and label smoothing count the valid classes. ``'mean'`` divides by torch's denominator restricted to
the valid rows, and is torch's 0/0 if all valid rows are ignored.

Invalid rows are passed to torch's kernels as rows to ignore. That excludes them from sums, denominators and gradients,
and an invalid target is never used as an index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import (
    LOSS,
    Bound,
    Dense,
    Equation,
    Number,
    Sparse,
    accumulation_dtype,
    aligned_validity,
    as_bool,
    broadcast_along,
    by_rule,
    fill_where_invalid,
    intersect,
    masked_rule,
)
from op_registry.autocast import autocast_off, upcast_under_autocast
from op_registry.dimensions.movements import Loss
from op_registry.ops.losses.rules import MEAN, NONE, SUM, reduced
from op_registry.records.divided import gather_along, is_divided
from op_registry.records.slices import filled_for_exp, slices_on_all

aten = torch.ops.aten


def class_dim(x: Dense | Sparse) -> int:
    """The dimension of the classes: (C), (N, C), (N, C, d1, …)."""
    return 1 if x.ndim > 1 else 0


class Labels:
    """Targets that are class indices, in a form that is safe for torch's kernels.

    classes  int64, `ignore_index` where the row is invalid or ignored
    rows     validity of the rows; None where all are valid
    """

    def __init__(self, c: Bound, valid_at: Callable[[Tensor], Tensor | None] | None = None) -> None:
        """`valid_at` is a function of the classes: the validity of the input at each row's class."""
        target, ignore_index, x = c.target, c.ignore_index, c.self
        classes = target.data.to(torch.int64) if target.dtype is torch.uint8 else target.data
        classes = fill_where_invalid(classes, target.validity, ignore_index)
        valid_at_class = _validity_at_class(x, classes) if valid_at is None else valid_at(classes)
        valid_at_class = intersect(valid_at_class, _weight_validity(c.weight, classes))
        if valid_at_class is None:
            self.classes, self.rows = classes, target.validity
            return
        # torch refuses a class out of range, and never reads the input of an ignored row.
        not_read = (classes == ignore_index) | (classes < 0) | (classes >= x.shape[class_dim(x)])
        valid = as_bool(valid_at_class) | not_read
        self.classes = torch.where(valid, classes, ignore_index)
        self.rows = intersect(target.validity, valid)


def _validity_at_class(x: Dense, classes: Tensor) -> Tensor | None:
    """Validity of the input at each row's class."""
    v, dim = aligned_validity(x), class_dim(x)
    if v is None:
        return None
    if broadcast_along(v, dim):
        return v.squeeze(dim)
    index = classes.clamp(0, x.shape[dim] - 1).unsqueeze(dim)
    return gather_along(v.expand(x.shape), dim, index).squeeze(dim)


def _weight_validity(weight: Dense | None, classes: Tensor) -> Tensor | None:
    """Validity of the class weight of each row."""
    if weight is None or weight.validity is None:
        return None
    return weight.validity.expand(weight.shape).take(classes.clamp(0, weight.shape[0] - 1))


def _filled(x: Dense | None, fill: Number) -> Tensor | None:
    return None if x is None else x.filled(fill)


# ---------------------------------------------------------------------------------------------- negative log likelihood


@masked_rule(
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_nd.default,
    category=LOSS,
    takes_call=True,
    dims=Loss(Equation("nc*,n*,c->n*", "c,,c->", counts={"target": "c"})),
)
def nll_loss(c: Bound) -> Dense:
    return _of_labels(c, c.self.filled(0), Labels(c))


def _of_labels(c: Bound, scores: Tensor, labels: Labels) -> Dense:
    """The operator of a call on scores of all classes."""
    safe = {**c.named, "self": scores, "target": labels.classes, "weight": _filled(c.weight, 1)}
    if not is_divided(scores):
        return _of_all_rows(c.op(*safe.values()), labels, c.reduction)
    losses = c.op(*{**safe, "weight": None, "reduction": NONE}.values())
    return reduced_over_rows(c, weighted_rows(c, losses, labels), labels)


def _of_all_rows(data: Tensor, labels: Labels, reduction: int) -> Dense:
    """What torch has reduced, as valid as its rows."""
    return Dense(data, labels.rows if reduction == NONE else Dense(labels.classes, labels.rows).any_valid())


def _weights_of_rows(c: Bound, labels: Labels) -> Tensor:
    """What a row counts in the mean: its class's weight, 0 where it is ignored."""
    counted = labels.classes != c.ignore_index
    weights = _filled(c.weight, 1)
    return counted if weights is None else torch.where(counted, weights.take(labels.classes * counted), 0)


def weighted_rows(c: Bound, losses: Tensor, labels: Labels) -> Tensor:
    """Losses of rows that are divided among processes, 0 where they are ignored, times their weights.

    torch's own mean is that of the processes' means, however many rows each of them ignores; and the derivative of its
    loss_parallel looks up the weights of ignored rows.
    """
    return losses if c.weight is None else losses * _weights_of_rows(c, labels)


def reduced_over_rows(c: Bound, losses: Tensor, labels: Labels) -> Dense:
    """Weighted losses of rows, 0 where they are ignored, reduced."""
    if c.reduction not in (MEAN, SUM):
        return Dense(losses, labels.rows)
    total = losses.sum(dtype=accumulation_dtype(losses.dtype))
    if c.reduction == MEAN:
        total = total / _weights_of_rows(c, labels).sum()
    return _of_all_rows(total.to(losses.dtype), labels, c.reduction)


@masked_rule(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    category=LOSS,
    takes_call=True,
    dims=Loss(Equation("nc*,n*,c->n*,", "c,,c->,", counts={"target": "c"})),
)
def nll_loss_forward(c: Bound) -> tuple[Dense, Dense]:
    """The loss, and the total weight of the rows in its mean."""
    labels = Labels(c)
    data, total_weight = c.op(c.self.filled(0), labels.classes, _filled(c.weight, 1), c.reduction, c.ignore_index)
    return _of_all_rows(data, labels, c.reduction), Dense(total_weight)


# -------------------------------------------------------------------------------------------------------- cross entropy


@masked_rule(
    aten.cross_entropy_loss.default,
    category=LOSS,
    takes_call=True,
    torch_if_valid=True,
    dims=Loss(Equation("nc*,nc*,c->n*", "nc*,n*,c->n*", "c,c,c->", "c,,c->", counts={"target": "c"})),
)
def cross_entropy_loss(c: Bound) -> Dense:
    if not c.self.dtype.is_floating_point:
        aten.log_softmax(c.self.data.new_zeros(1), 0)  # raises torch's error
    if c.target.dtype.is_floating_point:
        return _of_probabilities(c)
    return _of_labels(c, _scores(c.self), Labels(c)) if c.label_smoothing == 0 else _smoothed(c, Labels(c))


def _scores(x: Dense) -> Tensor:
    """The input with -inf at invalid classes, for a softmax over the valid ones; 0 in rows without valid classes."""
    x = slices_on_all(x, class_dim(x))
    v = aligned_validity(x)
    if v is None or broadcast_along(v, class_dim(x)):
        return x.filled(0)
    return filled_for_exp(Dense(x.data, v), class_dim(x))


def _log_softmax(x: Dense) -> Dense:
    scores, dim = upcast_under_autocast(_scores(x)), class_dim(x)
    # Under torch's loss_parallel, the derivative of log_softmax is that of a negative log likelihood of it.
    logp = scores - scores.logsumexp(dim, keepdim=True) if is_divided(scores) else torch.log_softmax(scores, dim)
    return Dense(logp, aligned_validity(x))


def _by_class(weight: Tensor, x: Dense) -> Tensor:
    """One value per class, shaped to broadcast with `x`."""
    return weight.reshape(-1, *[1] * (x.ndim - class_dim(x) - 1))


def _weighted(logp: Dense, weight: Dense | None) -> Dense:
    """Log-probabilities times class weights."""
    if weight is None:
        return logp
    validity = None if weight.validity is None else _by_class(weight.validity.expand(weight.shape), logp)
    filled = logp.filled(0) * _by_class(weight.filled(1), logp)
    product = Dense(filled, intersect(logp.validity, validity))
    return Dense(filled, aligned_validity(product))


def _number_of_classes(x: Dense) -> Tensor | int:
    """The number of valid classes of each row, at least 1, as a divisor."""
    n = Dense(x.data, aligned_validity(x)).count(class_dim(x))
    return n.clamp(min=1) if isinstance(n, Tensor) else n


def _smoothed(c: Bound, labels: Labels) -> Dense:
    """(1 - smoothing) · loss + smoothing · mean loss over the row's valid classes."""
    logp = _log_softmax(c.self)
    if is_divided(c.self.data):
        nll = aten.cross_entropy_loss(_scores(c.self), labels.classes, None, NONE, c.ignore_index)
        nll = weighted_rows(c, nll, labels)
    else:
        nll = aten.nll_loss_nd(logp.filled(0), labels.classes, _filled(c.weight, 1), NONE, c.ignore_index)
    uniform_loss = -_weighted(logp, c.weight).filled(0).sum(class_dim(logp)) / _number_of_classes(c.self)
    mixed = (1 - c.label_smoothing) * nll + c.label_smoothing * uniform_loss
    return reduced_over_rows(c, torch.where(labels.classes != c.ignore_index, mixed, 0), labels)


def _of_probabilities(c: Bound) -> Dense:
    """Targets that are probabilities: the sum over the classes that are valid in both input and target."""
    probabilities: Any = c.target.filled(0)
    dim, smoothing = class_dim(c.self), c.label_smoothing
    if smoothing > 0:
        n = _number_of_classes(c.self)
        uniform = smoothing / (n if isinstance(n, int) else n.unsqueeze(dim))
        probabilities = probabilities * (1 - smoothing) + uniform
    terms = _weighted(_log_softmax(c.self), c.weight)
    terms = Dense(terms.filled(0) * probabilities, intersect(terms.validity, c.target.validity))
    terms = Dense(terms.data, aligned_validity(terms))
    return reduced(Dense(-terms.filled(0).sum(dim), terms.any_valid(dim)), c.reduction)


# -------------------------------------------------------------------------------------------------------------- margins


@masked_rule(
    aten.multi_margin_loss.default,
    category=LOSS,
    torch_if_valid=True,
    dims=Loss(Equation("nc,n,c->n", "c,,c->", "c,t,c->", counts={"target": "c"})),
)
def multi_margin_loss(
    self: Dense,
    target: Dense,
    p: Number = 1,
    margin: Number = 1,
    weight: Dense | None = None,
    reduction: int = MEAN,
) -> Dense:
    """The mean over the row's valid classes: an input of -inf is within any margin and contributes nothing."""
    x, classes = _with_classes(self), target.filled(0)
    rows = intersect(target.validity, intersect(_validity_at_row_class(x, classes), _weight_validity(weight, classes)))
    losses = aten.multi_margin_loss(_within_margin(x, rows), classes, p, margin, _filled(weight, 1), NONE)
    return _mean_over_classes(x, losses, rows, reduction)


@masked_rule(
    aten.multilabel_margin_loss.default,
    category=LOSS,
    torch_if_valid=True,
    dims=Loss(Equation("nc,nc->n", "c,c->", counts={"target": "c"})),
)
def multilabel_margin_loss(self: Dense, target: Dense, reduction: int = MEAN) -> Dense:
    """Targets end at the first -1. A row is valid where all targets before it are, and the input at them."""
    x, labels = _with_classes(self), _with_classes(target)
    filled = labels.filled(0)
    ends = filled == -1 if labels.valid is None else (filled == -1) & labels.valid
    is_label = ends.to(torch.int32).cumsum(-1) == 0
    v = aligned_validity(x)
    label_validity = intersect(
        labels.validity, None if v is None else v.expand(x.shape).gather(-1, filled.clamp(min=0))
    )
    rows = None if label_validity is None else (as_bool(label_validity) | ~is_label).all(-1)
    classes = torch.where(is_label if rows is None else is_label & rows.unsqueeze(-1), filled, -1)
    losses = aten.multilabel_margin_loss(_within_margin(x, rows), classes, NONE)
    return _mean_over_classes(x, losses, rows, reduction)


def _with_classes(x: Dense) -> Dense:
    """A 0-d input as a row with one class."""
    return x.map(lambda t: t.reshape(1)) if x.ndim == 0 else x


def _validity_at_row_class(x: Dense, classes: Tensor) -> Tensor | None:
    """Validity of the input at the class of its row, for inputs (C) and (N, C)."""
    v = aligned_validity(x)
    if v is None:
        return None
    index = classes.clamp(0, x.shape[-1] - 1).reshape(*x.shape[:-1], 1)
    return gather_along(v.expand(x.shape), -1, index).reshape(classes.shape)


def _within_margin(x: Dense, rows: Tensor | None) -> Tensor:
    """The input, with -inf at invalid classes and 0 throughout invalid rows."""
    scores = x.filled(-torch.inf)
    return scores if rows is None else fill_where_invalid(scores, _as_rows(rows, x).unsqueeze(-1), 0)


def _as_rows(rows: Tensor, x: Dense) -> Tensor:
    """The validity of rows in the shape of x without its classes; a target of one row may be 0-d or of size 1."""
    return rows.expand(x.shape[:-1]) if rows.ndim == x.ndim - 1 else rows.reshape(x.shape[:-1])


def _mean_over_classes(x: Dense, losses: Tensor, rows: Tensor | None, reduction: int) -> Dense:
    """Row losses that torch has divided by the number of all classes, divided by the number of valid ones instead."""
    n = x.count(-1)
    if isinstance(n, Tensor):
        losses = losses * x.shape[-1] / n.clamp(min=1).expand(x.shape[:-1]).reshape(losses.shape)
    return reduced(Dense(losses, None if rows is None else _as_rows(rows, x).reshape(losses.shape)), reduction)


# -------------------------- torch.nn.functional.linear_cross_entropy in chunks of the batch, as chosen by its `options`

# (Without options torch itself decomposes it into linear and cross_entropy.) With a mask both run on the whole batch:
# chunks only save memory, and their operators compute gradients in the forward pass without a mask. As in the chunks,
# everything is computed in `acc_dtype`.


def composed(c: Bound, reduction: int) -> Dense:
    """The loss, in the dtype of the input."""

    def wide(x: Dense | None) -> Dense | None:
        return None if x is None else x.like(x.data.to(c.acc_dtype))

    with autocast_off(c.input.device):
        logits = by_rule(aten.linear.default, wide(c.input), wide(c.linear_weight), wide(c.linear_bias))
        options = (wide(c.weight), reduction, c.ignore_index)
        loss = by_rule(aten.cross_entropy_loss.default, logits, c.target, *options)
    return Dense(loss.data.to(c.input.dtype), loss.validity)


# Not every supported version of torch has it.
if hasattr(torch.nn, "LinearCrossEntropyOptions"):
    # The module that defines the operators; torch imports it at the first call.
    import torch.nn.modules.linear_cross_entropy

    torch_nn = torch.ops.torch_nn

    @masked_rule(
        torch_nn._linear_cross_entropy_batch_chunked.default,
        category=LOSS,
        takes_call=True,
        torch_if_valid=True,
        dims=Equation("nk,ck,n,c,c->,AB,CD,E"),
    )
    def _linear_cross_entropy_batch_chunked(c: Bound) -> tuple[Any, ...]:
        """The composition of linear and cross_entropy.

        Instead of gradients from the forward pass, it returns the empty tensors of a call without gradients.
        """
        no_gradients: list[Tensor] = [c.input.data.new_empty(size) for size in ((0, 0), (0, 0), (0,))]
        return (composed(c, {"mean": MEAN, "sum": SUM}[c.reduction]), *no_gradients)

    @masked_rule(
        torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default,
        category=LOSS,
        takes_call=True,
        torch_if_valid=True,
        dims=Equation("nk,ck,n,c,c->n"),
    )
    def _linear_cross_entropy_batch_chunked_no_reduction(c: Bound) -> Any:
        """The composition of linear and cross_entropy: the loss of every row."""
        return composed(c, NONE)
