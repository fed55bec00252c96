"""Losses: the elementwise part as plain torch has it, then a sum or mean over what is valid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import TABLE, Call, NoOracle, Slot, broadcast_valid, oracle

NONE, MEAN, SUM = 0, 1, 2


def _over(x: Tensor, mask: Tensor, reduction: int, weight: Tensor | None = None) -> Slot:
    """The sum or mean of the valid losses; a mean divides by their number, or by their total weight."""
    if reduction == NONE:
        return Slot(x, mask)
    kept = x[mask]
    known = torch.tensor(bool(len(kept)) or not x.numel())
    total = kept.sum()
    if reduction == MEAN:
        total = total / (weight[mask].sum() if weight is not None else len(kept))
    return Slot(total, known)


@oracle(
    """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss soft_margin_loss
    hinge_embedding_loss margin_ranking_loss"""
)
def elementwise_loss(c: Call) -> Slot:
    """Every operand at its position, reduced over the valid positions."""
    each = c.plainly({"reduction": NONE})
    out = c.plainly()
    result = _over(each, broadcast_valid(each.shape, c.slots()), c["reduction"])
    return Slot(result.data.to(out.dtype), result.mask)


@oracle("binary_cross_entropy_with_logits")
def with_logits(c: Call) -> Slot:
    """As elementwise_loss; weight and pos_weight broadcast."""
    return elementwise_loss(c)


def _classes_last(x: Slot) -> tuple[Tensor, Tensor]:
    """(rows, classes) of an (N, C, …) or (C,) input."""
    data, mask = (x.data, x.mask) if x.ndim > 1 else (x.data.unsqueeze(0), x.mask.unsqueeze(0))
    return data.movedim(1, -1).reshape(-1, data.shape[1]), mask.movedim(1, -1).reshape(-1, data.shape[1])


def _class_losses(
    c: Call, logp: Tensor, logp_known: Tensor, target: Slot, weight: Slot | None, smoothing: float
) -> Slot:
    reduction, ignore = c["reduction"], c["ignore_index"]
    losses, known, weights = [], [], []
    ones = torch.ones(logp.shape[1], dtype=logp.dtype)
    factor = weight.data if weight is not None else ones
    factor_known = weight.mask if weight is not None else torch.ones(logp.shape[1], dtype=torch.bool)
    zero = torch.zeros((), dtype=logp.dtype)
    for row, row_known, t, t_known in zip(
        logp, logp_known, target.data.reshape(-1).tolist(), target.mask.reshape(-1).tolist(), strict=True
    ):
        if not t_known:
            entry = zero, False, zero
        elif t == ignore:
            entry = zero, True, zero
        else:
            loss = -row[t] * factor[t]
            here = row_known & factor_known
            if smoothing:
                classes = int(row_known.sum())
                spread = -(row[here] * factor[here]).sum() / max(classes, 1)
                loss = loss * (1 - smoothing) + spread * smoothing
            entry = loss, bool(here[t]), factor[t]
        losses.append(entry[0])
        known.append(entry[1])
        weights.append(entry[2])
    each = torch.stack(losses) if losses else torch.zeros(0, dtype=logp.dtype)
    mask = torch.tensor(known, dtype=torch.bool)
    out = c.plainly()
    if reduction == NONE:
        return Slot(each.reshape(out.shape), mask.reshape(out.shape))
    if not mask.any() and len(mask):
        return Slot(out, torch.tensor(False))
    total = each[mask].sum()
    if reduction == MEAN:
        total = total / torch.stack(weights)[mask].sum() if losses else out
    return Slot(total.to(out.dtype), torch.tensor(True))


@oracle("nll_loss_nd", "nll_loss", "nll_loss2d")
def nll_loss(c: Call) -> Slot:
    """Row by row; ignored rows are torch's own zero, and have no weight in a mean."""
    logp, known = _classes_last(c["self"])
    return _class_losses(c, logp, known, c["target"], c["weight"], 0.0)


@oracle("cross_entropy_loss")
def cross_entropy(c: Call) -> Slot:
    """Softmax over the valid classes of each row, then nll_loss, or the dot product with class probabilities."""
    x, target, smoothing = c["self"], c["target"], c["label_smoothing"]
    data, mask = _classes_last(x)
    logp = torch.zeros_like(data)
    rows = []
    for row, known in zip(data, mask, strict=True):
        kept = known.nonzero()[:, 0]
        spread = torch.zeros_like(row)
        rows.append(spread.index_put((kept,), row[kept].log_softmax(0)) if len(kept) else spread)
    logp = torch.stack(rows) if rows else logp
    if not target.data.is_floating_point():
        return _class_losses(c, logp, mask, target, c["weight"], smoothing)
    if target.shape != x.shape:
        raise NoOracle("cross entropy with probabilities of another shape")
    share, share_known = _classes_last(target)
    losses, known_rows = [], []
    weight = c["weight"]
    for row, row_known, t, t_known in zip(logp, mask, share, share_known, strict=True):
        both = row_known & t_known
        if weight is not None:
            both = both & weight.mask
        factor = weight.data if weight is not None else torch.ones_like(row)
        if smoothing:
            t = t * (1 - smoothing) + smoothing / max(int(row_known.sum()), 1)
        losses.append(-(row[both] * t[both] * factor[both]).sum())
        known_rows.append(bool(both.any()))
    out = c.plainly()
    each, known = torch.stack(losses), torch.tensor(known_rows)
    if c["reduction"] == NONE:
        return Slot(each.reshape(out.shape), known.reshape(out.shape))
    return _over(each, known, c["reduction"])


@oracle("torch_nn::_linear_cross_entropy_batch_chunked", "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy(c: Call) -> Any:
    """What the oracle of cross entropy says of what the oracle of linear gives; no gradients ahead of time."""

    def wide(x: Slot | None) -> Slot | None:
        return None if x is None else Slot(x.data.to(c["acc_dtype"]), x.mask)

    operands = (wide(c["input"]), wide(c["linear_weight"]), wide(c["linear_bias"]))
    logits = TABLE["linear"](Call.of(torch.ops.aten.linear.default, operands, {}))
    reduction = {"none": NONE, "mean": MEAN, "sum": SUM}[c.get("reduction", "none")]
    given = (logits, c["target"], wide(c["weight"]), reduction, c["ignore_index"])
    loss = TABLE["cross_entropy_loss"](Call.of(torch.ops.aten.cross_entropy_loss.default, given, {}))
    result = Slot(loss.data.to(c["input"].data.dtype), loss.mask)
    return result if reduction == NONE else (result, *(torch.empty(size) for size in ((0, 0), (0, 0), (0,))))
