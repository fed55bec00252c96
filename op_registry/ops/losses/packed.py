"""Losses of hybrid storage: computed on the stored rows.

The reduction counts those rows: what is not stored is invalid, and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
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
    full_mask,
    in_base_order,
    lead_operand,
    map_tensors,
    to_base_order,
)
from op_registry.ops.losses import classification
from op_registry.ops.losses import rules as losses


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
    return result if result.ndim == 0 else lead.like(result.map(lambda t: t[: lead.values.shape[0]]))


def _loss_by_place(rule: Rule) -> None:
    """A loss of operands of one shape."""

    def run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        found: list[Dense | Sparse] = []
        map_tensors(found.append, [*args, *kwargs.values()], (Dense, Sparse))
        lead = lead_operand(found)
        there = map_tensors(lambda r: align_to(r, lead), (args, list(kwargs.items())), (Dense, Sparse))
        args, named = _never_empty(there, lead)
        return map_tensors(lambda r: _as_loss(r, lead), rule.bind(op)(*args, **dict(named)), Dense)

    rule.lowering(Sparse)(run)
    rule.lowering(Permuted)(in_base_order(run))


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
        x = self.base if isinstance(self, Permuted) else self
        if not isinstance(x, Sparse) or len(x.dense_sizes) != 1 or x.pattern.block or isinstance(weight, Sparse):
            raise NotLowered("its classes are no dense dimension of the input")
        seen = self.order if isinstance(self, Permuted) else tuple(range(x.ndim))
        if seen != (0, x.ndim - 1, *range(1, x.ndim - 1)) and x.ndim != 2:
            raise NotLowered("its classes are no dense dimension of the input")
        labels = Sparse(x.values.map(lambda t: t[:, 0]), x.pattern)
        values = x.values
        if target.shape == labels.shape:
            there = align_to(target, labels)
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
            there = align_to(to_base_order(target, self) if isinstance(self, Permuted) else target, x)
            values, there = _never_empty((values, there), x)
        else:
            raise NotLowered(f"a target of shape {tuple(target.shape)} has neither a class nor classes for each row")
        return _as_loss(rule.bind(op)(values, there, weight, reduction, ignore_index, *smoothing), labels)

    rule.lowering(Permuted)(run)
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
    validity = torch.cat([as_int8(full_mask(rows)), as_int8(valid).expand(sizes)])
    return Dense(data, validity)


nll_loss = _loss_over_classes(classification.nll_loss)


cross_entropy_loss = _loss_over_classes(classification.cross_entropy_loss)
