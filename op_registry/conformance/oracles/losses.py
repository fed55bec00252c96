"""Losses: plain torch elementwise, or on each row's valid elements, then a sum or mean over the valid losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles import by_category
from op_registry.conformance.oracles.call import (
    TABLE,
    Call,
    Expected,
    Group,
    NoOracle,
    Refused,
    broadcast_valid,
    groups,
    map_groups,
    oracle,
    reduce_groups,
    slices,
    valid,
)

NONE, MEAN, SUM = 0, 1, 2


def reduced(losses: Expected, reduction: int, out: Tensor, weight: Tensor | None = None) -> Expected:
    """The losses in the shape of `out`, or their sum or mean; a mean divides by their number or total weight."""
    if reduction == NONE:
        return Expected(losses.data.reshape(out.shape).to(out.dtype), losses.mask.reshape(out.shape))
    valid_losses = losses.data[losses.mask]
    if not len(valid_losses):
        return Expected(out, torch.tensor(not losses.data.numel()))
    total = valid_losses.sum()
    if reduction == MEAN:
        total = total / (weight[losses.mask].sum() if weight is not None else len(valid_losses))
    return Expected(total.to(out.dtype), torch.tensor(True))


def _stacked(losses: Sequence[tuple[Tensor, bool]], dtype: torch.dtype) -> Expected:
    """One loss for each row, and whether it is valid."""
    data = [loss.reshape(()) for loss, _ in losses]
    mask = torch.tensor([known for _, known in losses], dtype=torch.bool)
    return Expected(torch.stack(data) if data else torch.zeros(0, dtype=dtype), mask)


@oracle(
    """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss soft_margin_loss
    hinge_embedding_loss margin_ranking_loss binary_cross_entropy_with_logits"""
)
def elementwise_loss(c: Call) -> Expected:
    """Elementwise in every operand, reduced over the valid losses."""
    losses = c.plain(reduction=NONE)
    return reduced(Expected(losses, broadcast_valid(losses.shape, c.operands())), c["reduction"], c.plain())


# ------------------------------------------------------------------------------------------------- classification


def _classes_last(x: Expected) -> Expected:
    """(rows, classes) of an (N, C, …) or (C,) input."""
    batched = x if x.ndim > 1 else x.map(lambda t: t.unsqueeze(0))
    classes = batched.shape[1]
    return batched.map(lambda t: t.movedim(1, -1).reshape(-1, classes))


def _class_losses(c: Call, logp: Expected, target: Expected, weight: Expected | None, smoothing: float) -> Expected:
    ignore = c["ignore_index"]
    losses, weights = [], []
    factor = weight.data if weight is not None else torch.ones(logp.shape[1], dtype=logp.data.dtype)
    factor_known = weight.mask if weight is not None else torch.ones(logp.shape[1], dtype=torch.bool)
    zero = torch.zeros((), dtype=logp.data.dtype)
    rows = zip(logp.data, logp.mask, target.data.reshape(-1).tolist(), target.mask.reshape(-1).tolist(), strict=True)
    for row, row_known, label, label_known in rows:
        if not label_known or label == ignore:
            losses.append((zero, label_known))
            weights.append(zero)
            continue
        known = row_known & factor_known
        loss = -row[label] * factor[label]
        if smoothing:
            uniform = -(row[known] * factor[known]).sum() / max(int(row_known.sum()), 1)
            loss = loss * (1 - smoothing) + uniform * smoothing
        losses.append((loss, bool(known[label])))
        weights.append(factor[label])
    total_weight = torch.stack(weights) if weights else None
    return reduced(_stacked(losses, logp.data.dtype), c["reduction"], c.plain(), total_weight)


@oracle("nll_loss_nd", "nll_loss", "nll_loss2d")
def nll_loss(c: Call) -> Expected:
    """Row by row; as in torch, ignored rows have a loss of zero, and no weight in a mean."""
    return _class_losses(c, _classes_last(c["self"]), c["target"], c["weight"], 0.0)


@oracle("cross_entropy_loss")
def cross_entropy(c: Call) -> Expected:
    """Softmax over the valid classes of each row, then nll_loss, or the dot product with class probabilities."""
    x, target, smoothing = c["self"], c["target"], c["label_smoothing"]
    logits = _classes_last(x)
    each = groups([logits], slices(logits.shape, [1]))
    logp: Expected = map_groups(each, lambda group: group.values[0].log_softmax(0), logits.data, logits.mask)
    if not target.data.is_floating_point():
        return _class_losses(c, logp, target, c["weight"], smoothing)
    if target.shape != x.shape:
        raise NoOracle("cross entropy with probabilities of another shape")
    probabilities, weight = _classes_last(target), c["weight"]
    losses = []
    for row, row_known, share, share_known in zip(
        logp.data, logp.mask, probabilities.data, probabilities.mask, strict=True
    ):
        known = row_known & share_known if weight is None else row_known & share_known & weight.mask
        factor = weight.data if weight is not None else torch.ones_like(row)
        if smoothing:
            share = share * (1 - smoothing) + smoothing / max(int(row_known.sum()), 1)
        losses.append((-(row[known] * share[known] * factor[known]).sum(), bool(known.any())))
    return reduced(_stacked(losses, logp.data.dtype), c["reduction"], c.plain())


@oracle("torch_nn::_linear_cross_entropy_batch_chunked", "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def linear_cross_entropy(c: Call) -> Any:
    """The oracle of cross entropy on the result of the oracle of linear; without precomputed gradients."""

    def wide(x: Expected | None) -> Expected | None:
        return None if x is None else Expected(x.data.to(c["acc_dtype"]), x.mask)

    operands = (wide(c["input"]), wide(c["linear_weight"]), wide(c["linear_bias"]))
    logits = by_category.contraction(Call.of(torch.ops.aten.linear.default, operands, {}))
    reduction = {"none": NONE, "mean": MEAN, "sum": SUM}[c.get("reduction", "none")]
    args = (logits, c["target"], wide(c["weight"]), reduction, c["ignore_index"])
    loss = TABLE["cross_entropy_loss"](Call.of(torch.ops.aten.cross_entropy_loss.default, args, {}))
    result = Expected(loss.data.to(c["input"].data.dtype), loss.mask)
    return result if reduction == NONE else (result, *(torch.empty(size) for size in ((0, 0), (0, 0), (0,))))


# -------------------------------------------------------------------------------------------------- margins, by row


@oracle("cosine_embedding_loss")
def cosine_embedding_loss(c: Call) -> Expected:
    """The cosine of the coordinates that are valid in both."""
    a, b, target = c["input1"], c["input2"], c["target"]
    plain = c.plain()
    width = a.shape[-1]
    losses = []
    invalid = torch.zeros((), dtype=plain.dtype), False
    for x, y, both, sign, sign_known in zip(
        a.data.reshape(-1, width),
        b.data.reshape(-1, width),
        (a.mask & b.mask).reshape(-1, width),
        target.data.reshape(-1),
        target.mask.reshape(-1),
        strict=True,
    ):
        known = bool(sign_known) and (bool(both.any()) or not width)
        losses.append((c.op(x[both], y[both], sign, c["margin"], NONE), True) if known else invalid)
    return reduced(_stacked(losses, plain.dtype), c["reduction"], plain)


def _rows(x: Expected) -> tuple[Tensor, Tensor]:
    """Data and mask as (rows, classes)."""
    width = x.shape[-1] if x.ndim else 1
    return x.data.reshape(-1, width), x.mask.reshape(-1, width)


@oracle("multi_margin_loss")
def multi_margin_loss(c: Call) -> Expected:
    """Each row over its valid classes; valid where the target's class is one of them."""
    target, weight = c["target"], c["weight"]
    plain = c.plain()
    losses = []
    invalid = torch.zeros((), dtype=plain.dtype), False
    for row, mask, label, label_known in zip(
        *_rows(c["self"]), target.data.reshape(-1).tolist(), target.mask.reshape(-1).tolist(), strict=True
    ):
        if not (label_known and bool(mask[label]) and (weight is None or bool(weight.mask[label]))):
            losses.append(invalid)
            continue
        factors = None if weight is None else weight.data[mask]
        label_among_valid = torch.tensor([int(mask[:label].sum())])
        losses.append((c.op(row[mask][None], label_among_valid, c["p"], c["margin"], factors, SUM), True))
    return reduced(_stacked(losses, plain.dtype), c["reduction"], plain)


@oracle("multilabel_margin_loss")
def multilabel_margin_loss(c: Call) -> Expected:
    """Each row over its valid classes; valid where every label before the first -1 is one of them."""
    plain = c.plain()
    targets, targets_known = _rows(c["target"])
    losses = []
    invalid = torch.zeros((), dtype=plain.dtype), False
    for row, mask, labels, labels_known in zip(
        *_rows(c["self"]), targets.tolist(), targets_known.tolist(), strict=True
    ):
        read: list[int | None] = []
        for label, label_known in zip(labels, labels_known, strict=True):
            if label_known and label == -1:
                break
            read.append(label if label_known and bool(mask[label]) else None)
        if None in read or not (read or bool(mask.any())):
            losses.append(invalid if read else (row.sum() * 0, True))
            continue
        others = [i for i in mask.nonzero()[:, 0].tolist() if i not in read]
        terms = [(1 - row[label] + row[i]).clamp_min(0) for label in read for i in others]
        losses.append((torch.stack(terms).sum() / int(mask.sum()) if terms else row[:0].sum(), True))
    return reduced(_stacked(losses, plain.dtype), c["reduction"], plain)


# ---------------------------------------------------------------------------------------------------------- alignments


@oracle("ctc_loss")
def ctc_loss(c: Call) -> Expected:
    """One sample at a time, cut to its lengths."""
    scores, targets = c["log_probs"], c["targets"]
    batched = scores.ndim == 3
    samples = scores if batched else scores.map(lambda t: t.unsqueeze(1))
    inputs, labels = (_lengths(c[name]) for name in ("input_lengths", "target_lengths"))
    if targets.ndim == 1 and samples.shape[1] > 1 and not labels.all_valid:
        raise Refused("ctc_loss of concatenated targets, of which a length is invalid")
    losses, start = [], 0
    for n in range(samples.shape[1]):
        steps, count = int(inputs.data[n]), int(labels.data[n])
        row = targets.map(lambda t, n=n: t[n] if t.ndim == 2 else t)
        mine = row.map(lambda t, s=start, count=count: t[s : s + count])
        used = samples.map(lambda t, n=n, steps=steps: t[:steps, n : n + 1])
        start += count if targets.ndim == 1 else 0
        if not (inputs.mask[n] and labels.mask[n] and mine.all_valid and used.all_valid):
            losses.append((samples.data.new_zeros(()), False))
            continue
        loss = torch.ops.aten.ctc_loss.IntList(
            used.data, mine.data.unsqueeze(0), [steps], [count], c["blank"], NONE, c["zero_infinity"]
        )
        losses.append((loss / max(count, 1) if c["reduction"] == MEAN else loss, True))
    return reduced(_stacked(losses, samples.data.dtype), c["reduction"], c.plain())


def _lengths(given: Expected | Sequence[int]) -> Expected:
    if isinstance(given, Expected):
        return given.map(lambda t: t.reshape(-1))
    lengths = torch.tensor(list(given))
    return Expected(lengths, lengths >= 0)


# ----------------------------------------- functions of neighbours and of pairs: cross products, covariances, distances

aten = torch.ops.aten


@oracle("cross", "linalg_cross")
def cross(c: Call) -> Expected:
    """Component i reads the two other components of both vectors."""
    out = c.plain()
    dim = c["dim"] if c["dim"] is not None else next(d for d, s in enumerate(c["self"].shape) if s == 3)
    mask = broadcast_valid(out.shape, [c["self"], c["other"]])
    return Expected(out, mask.roll(-1, dim) & mask.roll(-2, dim))


@oracle("trapezoid", "trapz", "cumulative_trapezoid")
def trapezoid(c: Call) -> Expected:
    """The sum of the intervals whose ends are both valid; as a reduction (or a scan over valid intervals)."""
    y, dim = c["y"], c["dim"]
    out = c.plain()
    n = y.shape[dim]
    if n < 2:
        return valid(out)
    if isinstance(c.get("x"), Expected):
        x = c["x"]
        if x.ndim == 1 and y.ndim != 1:
            shape = [1] * y.ndim
            shape[dim] = n
            x = _reshaped(x, shape)
        x, y = _expanded([x, y])
        width = x.data.narrow(dim, 1, n - 1) - x.data.narrow(dim, 0, n - 1)
    else:
        x = valid(y.data)
        width = torch.as_tensor(c.get("dx", 1))
    both = x.mask & y.mask
    interval = (y.data.narrow(dim, 1, n - 1) + y.data.narrow(dim, 0, n - 1)) * width / 2
    known = both.narrow(dim, 1, n - 1) & both.narrow(dim, 0, n - 1)
    terms = torch.where(known, interval, torch.zeros((), dtype=interval.dtype))
    if c.name == "cumulative_trapezoid":
        return Expected(terms.cumsum(dim).to(out.dtype), known)
    return Expected(terms.sum(dim).to(out.dtype), known.any(dim))


def _reshaped(x: Expected, shape: Sequence[int]) -> Expected:
    return x.map(lambda t: t.reshape(tuple(shape)))


def _expanded(operands: Sequence[Expected]) -> list[Expected]:
    """The operands, broadcast to one shape."""
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    return [x.map(lambda t: t.expand(shape)) for x in operands]


@oracle("cov", "corrcoef")
def cov(c: Call) -> Any:
    """Pairwise complete observations: each entry from the columns that are valid in both rows."""
    x = c["self"]
    weights = {name: c[name] for name in ("fweights", "aweights") if isinstance(c.get(name), Expected)}
    if not all(w.all_valid for w in weights.values()):
        raise NoOracle("cov with invalid weights")
    out = c.plain()
    # Convert the rows to the dtype of the result, to which wider weights promote it.
    rows = _reshaped(Expected(x.data.to(out.dtype), x.mask), (-1, x.shape[-1]) if x.ndim else (1, 1))

    def one(group: Group) -> Tensor:
        chosen = {name: weight.data[group.kept] for name, weight in weights.items()}
        matrix: Tensor = c.plain(self=torch.stack(group.values), **chosen)
        return matrix[0, 1]

    index = slices(rows.shape, [1])
    return reduce_groups(groups([rows, rows], itertools.product(list(index), repeat=2)), one, out)


# A distance of two vectors.
Distance = Callable[[Tensor, Tensor], Tensor]


def _distances(c: Call, operands: Sequence[Expected], pairs: Iterable[Sequence[Tensor]], one: Distance) -> Any:
    """`one` on the coordinates that are valid in both vectors of each pair."""
    return reduce_groups(groups(operands, pairs), lambda group: one(*group.values), c.plain())


@oracle("dist")
def dist(c: Call) -> Any:
    """Over the components that are valid in both."""
    operands = _expanded([c["self"], c["other"]])
    whole = torch.arange(operands[0].data.numel())
    return _distances(c, operands, [(whole, whole)], lambda x, y: aten.dist(x, y, c["p"]))


@oracle("pairwise_distance", "cosine_similarity")
def distance_along(c: Call) -> Any:
    """Over the components that are valid in both."""
    operands = _expanded([c["x1"], c["x2"]])
    ndim = operands[0].ndim
    dims = [c.get("dim", -1) % ndim] if ndim else []
    pairs = ((index, index) for index in slices(operands[0].shape, dims))
    if c.name == "cosine_similarity":
        return _distances(c, operands, pairs, lambda x, y: aten.cosine_similarity(x, y, 0, c["eps"]))
    return _distances(c, operands, pairs, lambda x, y: aten.pairwise_distance(x, y, c["p"], c["eps"]))


@oracle("cdist")
def cdist(c: Call) -> Any:
    """Every row of one matrix with every row of the other, over the coordinates that are valid in both."""
    a, b = c["x1"], c["x2"]
    if not a.data.numel() or not b.data.numel():
        return valid(c.plain())
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])

    def rows(matrices: Expected) -> Tensor:
        """(batches, rows, columns): flat indices into the matrices, broadcast."""
        index = torch.arange(matrices.data.numel()).reshape(matrices.shape)
        return index.expand(*lead, *matrices.shape[-2:]).reshape(-1, *matrices.shape[-2:])

    pairs = (pair for one, other in zip(rows(a), rows(b), strict=True) for pair in itertools.product(one, other))
    return _distances(c, [a, b], pairs, lambda x, y: torch.linalg.vector_norm(x - y, c["p"]))


@oracle("_pdist_forward", "pdist")
def pdist(c: Call) -> Any:
    """Every two rows, over the coordinates that are valid in both."""
    x = c["self"]
    pairs = itertools.combinations(slices(x.shape, [1]), 2)
    return _distances(c, [x, x], pairs, lambda u, v: torch.linalg.vector_norm(u - v, c["p"]))
