"""Losses on sparse storage: composed of other sparse operators and lookups, or on stored values by each rule itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    AnyRecord,
    Bound,
    Dense,
    NotLowered,
    Number,
    Permuted,
    Rule,
    Sparse,
    align_to,
    all_valid,
    as_int8,
    being_traced,
    call,
    first_of,
    intersect,
    on_call,
    raise_error_of_torch,
    shown,
    to_dense,
    valid_in_all,
)
from op_registry.dimensions.sizes import known_to_hold
from op_registry.ops.losses import classification
from op_registry.ops.losses import rules as losses
from op_registry.ops.losses.classification import Labels, class_dim, reduced_over_rows, weighted_rows
from op_registry.ops.losses.rules import reduced
from op_registry.records.dense import map_tensors
from op_registry.records.layout import concatenated, full_mask
from op_registry.sparse.convert import grid_coordinates, lookup
from op_registry.sparse.on_values import distance, joint_sums, lead_operand
from op_registry.sparse.permuted import groups_of, in_base_order, sparse_dims_first, to_base_order

aten = torch.ops.aten


# ----------------------------------------------------------------------------- composed of sparse operators and lookups


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


# -------------------------------------------------------------------------------- on stored values, by each rule itself

# The reduction counts stored rows only: rows that are not stored are invalid and contribute nothing.

T = TypeVar("T")  # records, through lists and tuples


def _with_invalid_row(records: T, lead: Sparse) -> T:
    """The operands with one invalid row appended if a non-empty tensor has no stored rows.

    The reduction of an empty tensor is torch's; that of a non-empty one without valid rows is invalid. Where a graph
    does not know how many rows are stored, there is always one more.
    """
    stored = lead.values.shape[0]
    if known_to_hold(stored != 0) or 0 in lead.shape:
        return records

    def appended(record: Dense) -> Dense:
        if record.ndim == 0 or not known_to_hold(record.shape[0] == stored):
            return record
        row = record.data.new_zeros((1, *record.shape[1:]))
        nothing = torch.zeros([1] * row.ndim, dtype=torch.int8, device=row.device)
        return concatenated([record, Dense(row, nothing)], 0)

    return map_tensors(appended, records, Dense)


def _as_loss(result: Dense, lead: Sparse) -> Dense | Sparse:
    """A reduced loss as it is, one loss per row with the sparsity pattern of `lead`."""
    return result if result.ndim == 0 else lead.like(result.map(lambda t: t[: lead.values.shape[0]]))


def _lower_elementwise(rule: Rule) -> None:
    """Lower a loss of operands of one shape: it runs on the values of one and the aligned values of the others."""

    def on_values(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        operands: list[Dense | Sparse] = []
        map_tensors(operands.append, [*args, *kwargs.values()], (Dense, Sparse))
        lead = lead_operand(operands)
        aligned = map_tensors(lambda r: align_to(r, lead), (args, list(kwargs.items())), (Dense, Sparse))
        args, named = _with_invalid_row(aligned, lead)
        return map_tensors(lambda r: _as_loss(r, lead), rule.bind(op)(*args, **dict(named)), Dense)

    rule.lowering(Sparse)(on_values)
    rule.lowering(Permuted)(in_base_order(on_values))


for _rule in losses.ELEMENTWISE:
    _lower_elementwise(_rule)


def _lower_over_classes(rule: Rule) -> Callable[..., Any]:
    """Lower a loss whose classes are the only dense dimension: (N, C), or a permuted view (B, C, T, …) of (B, T, …, C).

    Registered for permuted records; returned for sparse ones.
    """

    @on_call(dense="weight")
    def on_rows(c: Bound) -> Dense | Sparse:
        shown_self: tuple[Any, Any] = (c.self, ()) if isinstance(c.self, Dense) else shown(c.self)
        x, groups = shown_self
        classes_second = groups_of((0, x.ndim - 1, *range(1, x.ndim - 1)))
        if isinstance(x, Dense) or groups != classes_second or len(x.dense_sizes) != 1 or x.pattern.block:
            raise NotLowered("its classes are not the only dense dimension of the input, shown as its second")
        target, reduction, ignore_index = c.target, c.reduction, c.ignore_index
        rows = Sparse(x.values.map(lambda t: t[:, 0]), x.pattern)  # one value per row, for the shape and the pattern
        values = x.values
        if target.shape == rows.shape and not isinstance(target, Permuted):
            labels = align_to(target, rows)
            if reduction not in (losses.MEAN, losses.SUM):
                if being_traced(labels.data):
                    raise NotLowered("which rows are ignored is not known while tracing")
                if bool(_ignored(target, ignore_index) > _ignored(labels, ignore_index)):
                    raise NotLowered("some rows that are not stored are ignored, so that they have a valid loss of 0")
            elif 0 not in x.shape and (values.shape[0] == 0 or not all_valid(values, labels)):
                # Possibly no stored loss is valid. An ignored row is valid, stored or not: one row stands for them.
                ignored_elsewhere = _ignored(target, ignore_index) > _ignored(labels, ignore_index)
                values = _with_row(values, 0, torch.ones_like(ignored_elsewhere))
                labels = _with_row(labels, ignore_index, ignored_elsewhere)
        elif target.shape == c.self.shape:
            labels = align_to(_in_stored_order(target, c.self), x)
            values, labels = _with_invalid_row((values, labels), x)
        else:
            raise NotLowered(f"a target of shape {tuple(target.shape)} has neither one class nor all classes per row")
        return _as_loss(c.with_(self=values, target=labels).run(), rows)

    rule.lowering(Permuted)(on_rows)
    return on_rows


def _in_stored_order(target: AnyRecord, self: AnyRecord) -> Dense | Sparse:
    """The target with its dimensions in the order in which the input is stored."""
    if isinstance(self, Permuted):
        return to_base_order(target, self)
    return sparse_dims_first(target) if isinstance(target, Permuted) else target


def _ignored(target: Dense | Sparse, ignore_index: int) -> torch.Tensor:
    """The number of valid targets whose row is ignored."""
    labels = target.values if isinstance(target, Sparse) else target
    ignored = labels.data == ignore_index
    return (ignored if labels.valid is None else ignored & labels.valid).sum()


def _with_row(rows: Dense, value: Number, valid: torch.Tensor) -> Dense:
    """The rows, with one more that holds `value` appended."""
    sizes = (1, *rows.shape[1:])
    data = torch.cat([rows.data, rows.data.new_full(sizes, value)])
    validity = torch.cat([as_int8(full_mask(rows)), as_int8(valid).expand(sizes)])
    return Dense(data, validity)


# Classes along a sparse dimension, else row by row along a dense one.
for _rule, _composed in ((classification.nll_loss, nll_loss), (classification.cross_entropy_loss, cross_entropy_loss)):
    _rule.lowering(Sparse)(first_of(_composed, _lower_over_classes(_rule)))
