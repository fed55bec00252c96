"""Operators on sparse storage that are written in others: differences, distances, gates, losses, complex views.

Law: each as its own family has it. What they are made of keeps elements where they are stored, so that nothing else is
looked at; see the rules for dense storage for why each is the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.autocast import autocast_on
from op_registry.elementwise_lowering import leading, values_at
from op_registry.ops import assignment, differences, distances, losses, reductions, views
from op_registry.ops.losses import MEAN, NONE, SUM, reduced
from op_registry.ops.reductions import root
from op_registry.ops.sparse_choice import broadcast
from op_registry.ops.sparse_movement import moves
from op_registry.records import Dense, Number, as_bool, as_int8, being_traced, intersect, valid_in_all
from op_registry.sparse import NotLowered, Sparse
from op_registry.sparse_words import call, densely, elements_at, grid, only_sparse_records

aten = torch.ops.aten


def expanded(x: Any, shape: Sequence[int]) -> Any:
    """A sparse record in the shape that it broadcasts to; a dense one broadcasts by itself."""
    return broadcast(x, shape) if isinstance(x, Sparse) else x


def both(op: OpOverload, x: Any, y: Any, **kwargs: Any) -> Any:
    """An elementwise operator of two records that broadcast."""
    only_sparse_records(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return call(op, expanded(x, shape), expanded(y, shape), **kwargs)


def part(x: Any, dim: int, start: int, end: int) -> Any:
    return call(aten.slice.Tensor, x, dim, start, end, 1)


def in_float(*records: Any) -> None:
    """Of half precision and integers, the rules for dense storage have more to say."""
    if any(r.dtype not in (torch.float32, torch.float64) for r in records):
        raise NotLowered("it is computed in another dtype")
    if autocast_on(records[0].device):
        raise NotLowered("autocast chooses another dtype")


# ------------------------------------------------------------------------------------------ neighbours and copies


@differences.trace.lowering(Sparse)
def trace(op: OpOverload, x: Any) -> Any:
    op(torch.empty(x.shape, device="meta"))  # raises torch's errors
    if x.dtype is torch.bool:
        raise NotLowered("torch refuses its dtype")
    return call(aten.sum.default, call(aten.diagonal.default, x))


@differences.linalg_cross.lowering(Sparse)
def linalg_cross(op: OpOverload, x: Any, y: Any, *, dim: int = -1) -> Any:
    shape = op(*(torch.empty(r.shape, dtype=r.dtype, device="meta") for r in (x, y)), dim=dim).shape
    only_sparse_records(x, y)
    x, y = (expanded(r, shape) if isinstance(r, Sparse) else r.moved(lambda t: t.expand(shape)) for r in (x, y))

    def shifted(record: Any, places: int) -> Any:
        return call(aten.roll.default, record, [-places], [dim])

    ahead = call(aten.mul.Tensor, shifted(x, 1), shifted(y, 2))
    return call(aten.sub.Tensor, ahead, call(aten.mul.Tensor, shifted(x, 2), shifted(y, 1)))


@differences.trapezoid_dx.lowering(Sparse)
def trapezoid_dx(op: OpOverload, y: Any, *, dx: Number = 1, dim: int = -1) -> Any:
    heights = _heights(y, dim)
    total = densely(call(aten.sum.dim_IntList, heights, [dim]))
    return Dense(total.data * (dx / 2), total.validity)


@differences.trapezoid_x.lowering(Sparse)
def trapezoid_x(op: OpOverload, y: Any, x: Any, *, dim: int = -1) -> Any:
    heights = _heights(y, dim)
    if x.ndim == 1:
        width = both(aten.sub.Tensor, part(x, 0, 1, x.shape[0]), part(x, 0, 0, x.shape[0] - 1))
        width = densely(width)  # a line
        laid = [-1 if d == dim % y.ndim else 1 for d in range(y.ndim)]
        width = width.moved(lambda t: t.reshape(laid))
    elif x.ndim == y.ndim:
        width = both(aten.sub.Tensor, part(x, dim, 1, x.shape[dim]), part(x, dim, 0, x.shape[dim] - 1))
    else:
        raise NotLowered("its points have dimensions of their own")
    total = densely(call(aten.sum.dim_IntList, both(aten.mul.Tensor, heights, width), [dim]))
    return Dense(total.data / 2, total.validity)


def _heights(y: Any, dim: int) -> Any:
    if not isinstance(y, Sparse) or not -y.ndim <= dim < y.ndim or y.shape[dim] < 2 or not y.dtype.is_floating_point:
        raise NotLowered("its heights are stored densely, or there is no interval, or it is computed in another dtype")
    return call(aten.add.Tensor, part(y, dim, 0, y.shape[dim] - 1), part(y, dim, 1, y.shape[dim]))


def glu(op: OpOverload, self: Any, dim: int = -1) -> Any:
    aten.glu(torch.empty(self.shape, device="meta"), dim)  # raises torch's errors
    if not self.dtype.is_floating_point:
        raise NotLowered("torch refuses its dtype")
    half = self.shape[dim] // 2
    gate = call(aten.sigmoid.default, part(self, dim, half, 2 * half))
    return call(aten.mul.Tensor, part(self, dim, 0, half), gate)


@assignment.copy.lowering(Sparse)
def copy(op: OpOverload, x: Any, source: Any, non_blocking: bool = False) -> Any:
    only_sparse_records(x, source)
    if not isinstance(source, Sparse):
        raise NotLowered("what is copied is stored densely, and so is the result")
    whole = broadcast(source, x.shape)
    return whole.like(whole.values.like(whole.values.data.to(x.device, x.dtype, copy=True)))


@moves(views.view_as_real)
def view_as_real(x: Sparse) -> Sparse:
    """Two numbers for each that is stored: a dense dimension behind the others."""
    v = x.values.full_validity
    data = torch.view_as_real(x.values.data)
    return x.like(Dense(data, None if v is None else v.unsqueeze(-1).expand(data.shape)))


@moves(views.view_as_complex)
def view_as_complex(x: Sparse) -> Any:
    torch.view_as_complex(torch.empty(x.shape, dtype=x.dtype, device="meta"))  # raises torch's errors
    if x.ndim < 2:
        raise NotLowered("no sparse dimension is left")
    real, imaginary = (call(aten.select.int, x, -1, n) for n in (0, 1))
    return call(aten.complex.default, real, imaginary)


# ---------------------------------------------------------------------------------------------------------- distances


def distance(x: Any, y: Any, p: float, dim: Any, eps: float = 0) -> Dense:
    """The norm of the differences of what both have."""
    in_float(x, y)
    apart = both(aten.sub.Tensor, x, y)
    if eps:
        values = apart.values if isinstance(apart, Sparse) else apart
        moved = values.like(values.data + eps)
        apart = apart.like(moved) if isinstance(apart, Sparse) else moved
    result: Dense = densely(call(aten.linalg_vector_norm.default, apart, p, dim))  # a number for each row
    return result


@reductions.dist.lowering(Sparse)
def dist(op: OpOverload, x: Any, y: Any, p: float = 2) -> Any:
    return distance(x, y, p, None)


@distances.cdist.lowering(Sparse)
def cdist(op: OpOverload, x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    only_sparse_records(x, y)
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
    product, mine, theirs = _common(x, y, dim)
    lengths = root(Dense(mine.data)).data.clamp_min(eps) * root(Dense(theirs.data)).data.clamp_min(eps)
    return Dense(product.data / lengths, product.validity)


def _common(x: Any, y: Any, dim: int) -> tuple[Dense, Dense, Dense]:
    """Σxy, Σx² and Σy² over the coordinates that are valid in both."""
    only_sparse_records(x, y)
    in_float(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if 0 in shape or not -len(shape) <= dim < len(shape):
        raise NotLowered("torch refuses it, or there is nothing in it")
    x, y = expanded(x, shape), expanded(y, shape)
    lead = leading([x, y])
    a, b = (values_at(r, lead) for r in (x, y))
    joint = valid_in_all(a, b)
    a, b = (Dense(Dense(r.data.expand(lead.values.shape), joint).filled(0)) for r in (a, b))

    def total(t: Tensor) -> Dense:
        result: Dense = densely(call(aten.sum.dim_IntList, lead.like(Dense(t, joint)), [dim]))
        return Dense(result.filled(0), result.validity)

    return total(a.data * b.data), total(a.data * a.data), total(b.data * b.data)


# ------------------------------------------------------------------------------------------------------------- losses


@losses.cosine_embedding_loss.lowering(Sparse)
def cosine_embedding_loss(
    op: OpOverload, input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: int = MEAN
) -> Any:
    product, mine, theirs = _common(input1, input2, -1)
    target = densely(target)  # one for each row
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
    only_sparse_records(self, target, weight)
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
    labels = densely(target).moved(lambda t: t.reshape(-1))  # one for each row
    given = labels.filled(ignore_index).to(torch.int64)
    ignored = given == ignore_index
    wrong = (~ignored & ((given < 0) | (given >= classes))).nonzero()[:1, 0]
    if wrong.shape[0]:
        aten.nll_loss(torch.zeros((1, classes), device=self.device), given[wrong])  # raises torch's error
    safe = given.clamp(0, classes - 1)
    rows = list(grid(target.shape, self.device)) if target.ndim else []
    found = elements_at(self, [*rows[:dim], safe, *rows[dim:]])
    weights = None if weight is None else weight.moved(lambda t: t.index_select(0, safe))
    present = valid_in_all(found, weights)
    read = as_bool(present) if present is not None else torch.ones_like(ignored)
    counted = read & ~ignored
    w = torch.ones((), dtype=self.dtype, device=self.device) if weights is None else weights.filled(1)
    each = torch.where(counted, -torch.where(counted, found.data, 0) * w, 0)
    valid = read | ignored
    if labels.valid is not None:
        valid = valid & labels.valid
    if reduction == NONE:
        return Dense(each, as_int8(valid)).moved(lambda t: t.reshape(target.shape))
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
