"""Elementwise losses, and losses between vectors. Losses over classes are in classification.py.

Law: losses are elementwise, then reduced over the valid ones: ``'mean'`` divides by their number, ``'sum'`` adds them,
and both are valid where there is at least one. The operator itself runs without its reduction, on operands filled
with harmless values, so that its dtypes, autocast policy and errors apply; half-precision sums are computed in float32
and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    LOSS,
    Dense,
    Equation,
    Number,
    accumulation_dtype,
    aligned_validity,
    fill_where_invalid,
    intersect,
    masked_rule,
    valid_in_all,
)
from op_registry.autocast import upcast_under_autocast
from op_registry.bound import bind_by_name
from op_registry.dimensions.movements import Loss
from op_registry.dimensions.sizes import known_to_hold
from op_registry.rule import Run

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def reduced(loss: Dense, reduction: int, zero_where_invalid: bool = False) -> Dense:
    """The losses themselves, or the sum or mean of the valid ones."""
    if reduction not in (MEAN, SUM):
        return loss
    total = (loss.data if zero_where_invalid else loss.filled(0)).sum(dtype=accumulation_dtype(loss.dtype))
    if reduction == MEAN:
        n = loss.count()
        # Without valid losses an invalid 0, not 0/0, whose derivative would be NaN; without any losses torch's NaN.
        total = total / (n if not isinstance(n, Tensor) else at_least_one(n, loss.data.numel()))
    return Dense(total.to(loss.dtype), loss.any_valid())


def at_least_one(count: Tensor, size: int) -> Tensor:
    """A count of some among `size` elements, or 1; 0 where there are none at all."""
    if known_to_hold(size == 0) or known_to_hold(size != 0):
        return count.clamp(min=1) if size else count
    return torch.maximum(count, torch.full_like(count, size).clamp(max=1))


def of_elements(*fills: Number, zero: bool = False) -> Run:
    """The rule of an operator whose first arguments are operands, and whose losses are elementwise before reduction.

    fills  a value for each operand to fill it with where the loss is invalid, so that the loss and its derivatives are
           finite
    zero   whether this loss is 0, which saves another fill
    """

    def loss(op: OpOverload, *args: Any, **kwargs: Any) -> Dense:
        named = bind_by_name(op, args, kwargs)
        names, values = [*named], [*named.values()]
        at = names.index("reduction")
        for name in kwargs.keys() & names[: at + 1]:
            del kwargs[name]  # (passed in its place below)
        operands: list[Dense | None] = values[: len(fills)]
        reduction, given = named["reduction"], values[at + 1 : len(args)]

        def losses(tensors: Sequence[Tensor | None], reduction: int) -> Any:
            return op(*tensors, *values[len(fills) : at], reduction, *given, **kwargs)

        validity = valid_in_all(*operands)
        if validity is None:
            return Dense(losses([None if x is None else x.data for x in operands], reduction))

        def filled(x: Dense | None, value: Number) -> Tensor | None:
            # A 0-d operand stays 0-d: with a shape it would count in type promotion.
            return None if x is None else fill_where_invalid(x.data, validity if x.ndim else x.validity, value)

        tensors = [filled(x, value) for x, value in zip(operands, fills, strict=True)]
        unreduced = Dense(losses(tensors, NONE), validity)
        known_zero = zero and all(x is None or x.ndim > 0 for x in operands)
        return reduced(Dense(unreduced.data, aligned_validity(unreduced)), reduction, known_zero)

    return loss


ELEMENTWISE = (
    masked_rule(aten.mse_loss.default, aten.l1_loss.default, category=LOSS, takes_op=True)(
        of_elements(0, 0, zero=True)
    ),
    masked_rule(aten.smooth_l1_loss.default, aten.huber_loss.default, category=LOSS, takes_op=True)(
        of_elements(0, 0, zero=True)
    ),
    masked_rule(aten.soft_margin_loss.default, category=LOSS, takes_op=True)(of_elements(0, 1)),
    masked_rule(aten.hinge_embedding_loss.default, category=LOSS, takes_op=True)(of_elements(1, 1)),
    masked_rule(aten.margin_ranking_loss.default, category=LOSS, takes_op=True)(of_elements(0, 0, 1)),
    masked_rule(aten.binary_cross_entropy.default, category=LOSS, takes_op=True)(of_elements(0.5, 0.5, 1)),
    masked_rule(aten.binary_cross_entropy_with_logits.default, category=LOSS, takes_op=True)(of_elements(0, 0, 1, 1)),
    masked_rule(aten.kl_div.default, category=LOSS, takes_op=True)(of_elements(0, 1)),
    masked_rule(aten.poisson_nll_loss.default, category=LOSS, takes_op=True)(of_elements(1, 1)),
)


# -------------------------------------------------------------------------------------------------- between two vectors


@masked_rule(
    aten.cosine_embedding_loss.default,
    category=LOSS,
    torch_if_valid=True,
    dims=Loss(Equation("nd,nd,n->n", "d,d,->")),
)
def cosine_embedding_loss(
    input1: Dense, input2: Dense, target: Dense, margin: float = 0.0, reduction: int = MEAN
) -> Dense:
    """The cosine over the coordinates that are valid in both; valid where there is one and the target is valid."""
    joint = valid_in_all(input1, input2)
    pairs = Dense(input1.data, joint)
    has_common = pairs.any_valid(-1, keepdim=True)

    def filled(x: Dense) -> Tensor:
        # Vectors without a common coordinate are filled with 1, where a cosine has finite derivatives.
        return fill_where_invalid(fill_where_invalid(x.data, joint, 0), has_common, 1)

    losses = aten.cosine_embedding_loss(filled(input1), filled(input2), target.filled(1), margin, NONE)
    rows = None if has_common is None else has_common.squeeze(-1)
    return reduced(Dense(losses, intersect(rows, target.validity)), reduction)


@masked_rule(aten.triplet_margin_loss.default, category=LOSS, torch_if_valid=True, dims=Loss(Equation("*d,*d,*d->*")))
def triplet_margin_loss(
    anchor: Dense,
    positive: Dense,
    negative: Dense,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Dense:
    """Each distance over the coordinates that are valid in both vectors; valid where all have such a coordinate."""
    to_positive = _distance(anchor, positive, p, eps)
    to_negative = _distance(anchor, negative, p, eps)
    nearest = to_negative.data
    validity = valid_in_all(to_positive, to_negative)
    if swap:
        between = _distance(positive, negative, p, eps)
        nearest = torch.minimum(nearest, between.data)
        validity = intersect(validity, between.validity)
    losses = torch.clamp_min(margin + to_positive.data - nearest, 0)
    return reduced(Dense(losses, validity), reduction)


def _distance(x: Dense, y: Dense, p: float, eps: float) -> Dense:
    joint = valid_in_all(x, y)
    difference = Dense(upcast_under_autocast(x.data) - upcast_under_autocast(y.data) + eps, joint)
    difference = Dense(difference.data, aligned_validity(difference))
    has_common = difference.any_valid(-1, keepdim=True)
    # Without a common coordinate the norm is that of ones: a norm of zeros may have no derivative.
    filled = fill_where_invalid(difference.filled(0), has_common, 1)
    distance = torch.linalg.vector_norm(filled, p, -1)
    return Dense(distance, None if has_common is None else has_common.squeeze(-1))
