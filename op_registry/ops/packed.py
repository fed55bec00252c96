"""Operators on the rows of hybrid storage: a packed batch (B, T, D), or any sparse layout with dense dimensions.

Law: each operator's own, row by row. What it computes in an element of the sparse dimensions depends on the dense
dimensions of that element alone: a product with a weight, a norm, an embedding. So its rule runs as it is on the
values.
A loss runs on the rows that are there, and its reduction counts them: what is not stored is invalid, and adds nothing.

Dropout is drawn for the padded batch and the rows are taken from that, so that storage does not change the stream of
random numbers; see docs/semantics.md. Only packed storage promises that the padded batch is of a bearable size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.broadcast import present
from op_registry.elementwise_lowering import leading, values_at
from op_registry.ops import activations, classification, embedding, losses, matmul, norms, random, softmax
from op_registry.patterns import PACKED
from op_registry.records import Dense, Number, all_valid, as_int8, being_traced, map_tensors
from op_registry.rule import Rule
from op_registry.sparse import NotLowered, Sparse
from op_registry.turned import Turned, in_base_order, on_last_dims, turned_back

aten = torch.ops.aten


def rows_of(x: Any, *others: Any) -> Sparse:
    """The operand whose rows are worked on: sparse, with dense dimensions; NotLowered if another operand is sparse."""
    if not isinstance(x, Sparse) or any(isinstance(other, (Sparse, Turned)) for other in others):
        raise NotLowered("an operand other than the first is sparse")
    if not x.dense_sizes or x.shape[-1] == 0:
        raise NotLowered("the dimension that it works on is sparse, or empty")
    return x


# ---------------------------------------------------------------------------------------------------------- products


def linear(op: OpOverload, input: Any, weight: Any, bias: Any = None) -> Any:
    x = rows_of(input, weight, bias)
    return x.like(matmul.linear.run(x.values, weight, bias))


def matmul_with_plain(op: OpOverload, self: Any, other: Any) -> Any:
    """A product with a vector, or with one matrix for all rows."""
    x = rows_of(self, other)
    if other.ndim not in (1, 2):
        raise NotLowered("each element of a sparse dimension has a matrix of its own")
    return x.like(matmul.matmul.run(op, x.values, other))


def mm(op: OpOverload, self: Any, mat2: Any, *out_dtype: torch.dtype) -> Any:
    x = rows_of(self, mat2)
    if x.ndim != 2 or mat2.ndim != 2:
        raise NotLowered("each element of a sparse dimension has a matrix of its own")
    return x.like(matmul.mm.run(op, x.values, mat2, *out_dtype))


def addmm(
    op: OpOverload,
    self: Any,
    mat1: Any,
    mat2: Any,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    x = rows_of(mat1, self, mat2)
    if x.ndim != 2 or mat2.ndim != 2:
        raise NotLowered("each element of a sparse dimension has a matrix of its own")
    result = x.like(Dense(x.values.data.new_empty(()).expand(x.values.shape[0], mat2.shape[1])))
    return x.like(matmul.addmm.run(op, values_at(self, result), x.values, mat2, *out_dtype, beta=beta, alpha=alpha))


matmul.linear.lowering(Turned)(on_last_dims(linear, lambda x, *args, **kwargs: 1))
matmul.matmul.lowering(Turned)(on_last_dims(matmul_with_plain, lambda x, other: 1))

# ------------------------------------------------------------------------------------------------------------- norms


def _normalized(rule: Rule) -> Callable[..., Any]:
    """A norm over the last dimensions, if these are dense: a lowering of sparse records."""

    def run(op: OpOverload, x: Any, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        given = rows_of(x, *args, *kwargs.values())
        if not 0 < len(normalized_shape) <= len(given.dense_sizes):
            raise NotLowered("it works along sparse dimensions")
        result = rule.run(op, given.values, normalized_shape, *args, **kwargs)
        return map_tensors(given.like, result, Dense)

    rule.lowering(Turned)(on_last_dims(run, lambda x, shape, *args, **kwargs: len(shape)))
    return run


layer_norm = _normalized(norms.layer_norm)
rms_norm = _normalized(norms.rms_norm)


@softmax.softmax.lowering(Turned)
def softmax_of_turned(op: OpOverload, x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
    at = dim + x.ndim if dim < 0 else dim
    if not 0 <= at < x.ndim or x.order[at] < x.base.pattern.ndim:
        raise NotLowered("it works along a sparse dimension that stands behind a dense one")
    base = x.base
    inside = x.order[at] - base.pattern.ndim + base.pattern.lead
    return x.like(base.like(softmax.softmax.bind(op)(base.values, inside, *args, **kwargs)))


def glu(op: OpOverload, self: Any, dim: int = -1) -> Any:
    """One half of a dense dimension, gated by the other."""
    x = rows_of(self)
    inside = (dim + x.ndim if dim < 0 else dim) - x.pattern.ndim
    if not 0 <= inside < len(x.dense_sizes):
        raise NotLowered("it works along a sparse dimension")
    return x.like(activations.glu.run(x.values, inside + x.pattern.lead))


# ----------------------------------------------------------------------------------------------------------- dropout


@random.dropout.lowering(Sparse)
def dropout(op: OpOverload, input: Any, p: float, train: bool) -> Any:
    """As on the padded batch: every place draws, and the rows that are there take what was drawn in theirs."""
    if 0 <= p <= 1 and (p == 0 or not train or 0 in input.shape):
        return input
    if input.pattern.layout is not PACKED or op not in (aten.dropout.default, aten.feature_dropout.default):
        raise NotLowered("it draws a random number for every element, stored or not")
    if not 0 <= p < 1:
        return input.like(random.dropout.run(op, input.values, p, train))  # everything, or torch's own error
    sizes = input.pattern.sizes
    dense = input.dense_sizes if op is aten.dropout.default else (1,) * len(input.dense_sizes)
    values = input.values.data
    if values.device.type == "cpu":  # in the steps that torch takes there, the last two for the rows alone
        drawn = values.new_empty((*sizes, *dense)).bernoulli_(1 - p).flatten(0, 1)
        kept = drawn.index_select(0, input.pattern.at()).div_(1 - p)
    else:
        drawn = aten.dropout(values.new_ones((*sizes, *dense)), p, True).flatten(0, 1)
        kept = drawn.index_select(0, input.pattern.at())
    return input.like(input.values.like(values * kept))


@random.dropout.lowering(Turned)
def dropout_of_turned(op: OpOverload, input: Any, p: float, train: bool) -> Any:
    """torch draws in the order in which the elements of a permuted tensor lie in memory, which is the base's."""
    if op is not aten.dropout.default:
        raise NotLowered("it draws a random number for every channel, stored or not")
    return input.like(dropout(op, input.base, p, train))


# --------------------------------------------------------------------------------------------------------- embedding


def embedding_of_rows(op: OpOverload, weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """A row of the weight for each stored index."""
    if not isinstance(weight, Dense):
        raise NotLowered("the weight is sparse")
    return indices.like(embedding.embedding.run(weight, indices.values, *args, **kwargs))


# ------------------------------------------------------------------------------------------------------------ losses


def _never_empty(records: Any, lead: Sparse) -> Any:
    """The operands of a reduction with one invalid row where no row is stored of a tensor that has some.

    Of no rows at all a reduction is what torch makes of nothing; of none that is valid it is invalid.
    """
    if lead.values.shape[0] != 0 or 0 in lead.shape:
        return records

    def grown(record: Dense) -> Dense:
        if record.ndim == 0 or record.shape[0] != 0:
            return record
        row = (1, *record.shape[1:])
        data = torch.cat([record.data, record.data.new_zeros(row)])
        return Dense(data, torch.zeros([1] * data.ndim, dtype=torch.int8, device=data.device))

    return map_tensors(grown, records, Dense)


def _as_loss(result: Dense, lead: Sparse) -> Any:
    """A loss that was reduced as it is, one for each row in the rows' places."""
    return result if result.ndim == 0 else lead.like(result.moved(lambda t: t[: lead.values.shape[0]]))


def _loss_by_place(rule: Rule) -> None:
    """A loss of operands of one shape."""

    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        found: list[Dense | Sparse] = []
        map_tensors(found.append, [*args, *kwargs.values()], (Dense, Sparse))
        lead = leading(found)
        there = map_tensors(lambda r: values_at(r, lead), (args, list(kwargs.items())), (Dense, Sparse))
        args, named = _never_empty(there, lead)
        return map_tensors(lambda r: _as_loss(r, lead), rule.bind(op)(*args, **dict(named)), Dense)

    rule.lowering(Sparse)(run)
    rule.lowering(Turned)(in_base_order(run))


for _rule in (
    losses.mse_loss,
    losses.smooth_l1_loss,
    losses.soft_margin_loss,
    losses.binary_cross_entropy,
    losses.binary_cross_entropy_with_logits,
    losses.kl_div,
    losses.poisson_nll_loss,
    losses.hinge_embedding_loss,
    losses.margin_ranking_loss,
):
    _loss_by_place(_rule)


def _loss_over_classes(rule: Rule) -> Callable[..., Any]:
    """A loss whose classes are the one dense dimension: (N, C), or (B, C, T, …) seen of (B, T, …, C)."""

    def run(
        op: OpOverload,
        self: Any,
        target: Any,
        weight: Any = None,
        reduction: int = losses.MEAN,
        ignore_index: int = -100,
        *smoothing: float,
    ) -> Any:
        x = self.base if isinstance(self, Turned) else self
        if not isinstance(x, Sparse) or len(x.dense_sizes) != 1 or x.pattern.block or isinstance(weight, Sparse):
            raise NotLowered("its classes are no dense dimension of the input")
        seen = self.order if isinstance(self, Turned) else tuple(range(x.ndim))
        if seen != (0, x.ndim - 1, *range(1, x.ndim - 1)) and x.ndim != 2:
            raise NotLowered("its classes are no dense dimension of the input")
        labels = Sparse(x.values.moved(lambda t: t[:, 0]), x.pattern)
        values = x.values
        if target.shape == labels.shape:
            there = values_at(target, labels)
            if reduction not in (losses.MEAN, losses.SUM):
                if being_traced(there.data):
                    raise NotLowered("which rows are ignored is not known while tracing")
                if bool(_ignored(target, ignore_index) > _ignored(there, ignore_index)):
                    raise NotLowered("rows that are not stored are ignored, which gives them a valid loss of 0")
            elif 0 not in x.shape and (values.shape[0] == 0 or not all_valid(values, there)):
                # Which of the stored losses is valid is unknown. An ignored row is valid, stored or not.
                elsewhere = _ignored(target, ignore_index) > _ignored(there, ignore_index)
                values = _with_row(values, 0, torch.ones_like(elsewhere))
                there = _with_row(there, ignore_index, elsewhere)
        elif target.shape == self.shape:
            there = values_at(turned_back(target, self) if isinstance(self, Turned) else target, x)
            values, there = _never_empty((values, there), x)
        else:
            raise NotLowered(f"a target of shape {tuple(target.shape)} has neither a class nor classes for each row")
        return _as_loss(rule.bind(op)(values, there, weight, reduction, ignore_index, *smoothing), labels)

    rule.lowering(Turned)(run)
    return run


def _ignored(target: Any, ignore_index: int) -> torch.Tensor:
    """How many valid targets say that their row is to be ignored."""
    if not isinstance(target, Dense):
        target = target.values
    ignored = target.data == ignore_index
    return (ignored if target.valid is None else ignored & target.valid).sum()


def _with_row(rows: Dense, value: Number, valid: torch.Tensor) -> Dense:
    """The rows, and one more behind them that holds `value`."""
    sizes = (1, *rows.shape[1:])
    data = torch.cat([rows.data, rows.data.new_full(sizes, value)])
    validity = torch.cat([as_int8(present(rows)), as_int8(valid).expand(sizes)])
    return Dense(data, validity)


nll_loss = _loss_over_classes(classification.nll_loss)
cross_entropy_loss = _loss_over_classes(classification.cross_entropy_loss)
