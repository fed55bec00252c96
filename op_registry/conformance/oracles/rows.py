"""Losses, look-ups and windows that work row by row: plain torch on each row with its invalid elements removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, Refused, Slot, oracle, valid

NONE, MEAN, SUM = 0, 1, 2


def _reduced(losses: list[Tensor | None], reduction: int, plain: Tensor) -> Slot:
    """Rows' losses (None where there is none), their sum or their mean."""
    known = [loss for loss in losses if loss is not None]
    if reduction == NONE:
        zero = torch.zeros((), dtype=plain.dtype)
        each = [zero if loss is None else loss.reshape(()) for loss in losses]
        mask = torch.tensor([loss is not None for loss in losses], dtype=torch.bool)
        return Slot(torch.stack(each).reshape(plain.shape).to(plain.dtype), mask.reshape(plain.shape))
    if not known:
        return Slot(plain.detach(), torch.tensor(not losses))
    total = torch.stack([loss.reshape(()) for loss in known]).sum()
    return Slot((total / len(known) if reduction == MEAN else total).to(plain.dtype), torch.tensor(True))


@oracle("cosine_embedding_loss")
def cosine_embedding_loss(c: Call) -> Slot:
    """The cosine of the coordinates that are valid in both."""
    a, b, target = c["input1"], c["input2"], c["target"]
    plain = c.plainly()
    width = a.shape[-1]
    losses: list[Tensor | None] = []
    for x, y, both, t, ok in zip(
        a.data.reshape(-1, width),
        b.data.reshape(-1, width),
        (a.mask & b.mask).reshape(-1, width),
        target.data.reshape(-1),
        target.mask.reshape(-1),
        strict=True,
    ):
        known = bool(ok) and (bool(both.any()) or not width)
        losses.append(c.op(x[both], y[both], t, c["margin"], NONE) if known else None)
    return _reduced(losses, c["reduction"], plain)


def _by_classes(c: Call) -> tuple[Tensor, Tensor]:
    x = c["self"]
    width = x.shape[-1] if x.ndim else 1
    return x.data.reshape(-1, width), x.mask.reshape(-1, width)


@oracle("multi_margin_loss")
def multi_margin_loss(c: Call) -> Slot:
    """Each row over its valid classes, of which the target has to be one."""
    target, weight = c["target"], c["weight"]
    plain = c.plainly()
    losses: list[Tensor | None] = []
    for row, mask, t, ok in zip(
        *_by_classes(c), target.data.reshape(-1).tolist(), target.mask.reshape(-1).tolist(), strict=True
    ):
        if not (ok and bool(mask[t]) and (weight is None or bool(weight.mask[t]))):
            losses.append(None)
            continue
        factors = None if weight is None else weight.data[mask]
        place = torch.tensor([int(mask[:t].sum())])
        losses.append(c.op(row[mask][None], place, c["p"], c["margin"], factors, SUM))
    return _reduced(losses, c["reduction"], plain)


@oracle("multilabel_margin_loss")
def multilabel_margin_loss(c: Call) -> Slot:
    """Each row over its valid classes, among which are all labels before the first -1."""
    target = c["target"]
    plain = c.plainly()
    width = target.shape[-1] if target.ndim else 1
    losses: list[Tensor | None] = []
    for row, mask, labels, oks in zip(
        *_by_classes(c), target.data.reshape(-1, width).tolist(), target.mask.reshape(-1, width).tolist(), strict=True
    ):
        read = []
        for t, ok in zip(labels, oks, strict=True):
            if ok and t == -1:
                break
            read.append(t if ok and bool(mask[t]) else None)
        if None in read or not (read or bool(mask.any())):
            losses.append(row.sum() * 0 if not read else None)
            continue
        others = [i for i in mask.nonzero()[:, 0].tolist() if i not in read]
        terms = [(1 - row[t] + row[i]).clamp_min(0) for t in read for i in others]
        losses.append(torch.stack(terms).sum() / int(mask.sum()) if terms else row[:0].sum())
    return _reduced(losses, c["reduction"], plain)


@oracle("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(c: Call) -> Any:
    """Sum, mean or maximum of each bag's valid elements; a bag of nothing, or of padding alone, is torch's zeros."""
    weight, indices, offsets, factors = c["weight"], c["indices"], c["offsets"], c["per_sample_weights"]
    if not offsets.all_valid:
        raise Refused("embedding_bag with invalid offsets")
    plain = c.plainly()
    reduce: Callable[[Tensor], Tensor] = (torch.sum, torch.mean, torch.max)[c["mode"]]
    starts = offsets.data.tolist()
    ends = [*starts[1:], indices.data.numel()] if not c["include_last_offset"] else starts[1:]
    padding = c.get("padding_idx", -1)
    padding = -1 if padding is None else padding
    if c.op._overloadname == "padding_idx" and c["padding_idx"] is not None:
        padding = padding % weight.shape[0]
    counts = torch.bincount(indices.data[indices.mask].reshape(-1).to(torch.int64), minlength=weight.shape[0])
    outputs: list[Tensor] = []
    known: list[bool] = []
    for start, end in zip(starts, ends, strict=False):
        there = [n for n in range(start, end) if not (bool(indices.mask[n]) and int(indices.data[n]) == padding)]
        for d in range(weight.shape[1]):
            taken = []
            for n in there:
                row = int(indices.data[n]) if bool(indices.mask[n]) else -1
                if row < 0 or not bool(weight.mask[row, d]) or (factors is not None and not bool(factors.mask[n])):
                    continue
                element = weight.data[row, d]
                if c["scale_grad_by_freq"]:
                    element = element.detach() + (element - element.detach()) / counts[row]
                taken.append(element if factors is None else element * factors.data[n])
            known.append(bool(taken) or not there)
            outputs.append(reduce(torch.stack(taken)) if taken else torch.zeros((), dtype=weight.data.dtype))
    shape = plain[0].shape
    found = torch.stack(outputs).reshape(shape).to(plain[0].dtype) if outputs else plain[0]
    mask = torch.tensor(known, dtype=torch.bool).reshape(shape)
    return (Slot(found, mask), *(valid(other) for other in plain[1:]))


@oracle("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(c: Call) -> Any:
    """The greatest valid element of each window; torch says of an ordered input where a window ends."""
    x, samples = c["self"], c["random_samples"]
    values, places = c.plainly()
    if not values.numel():
        return valid(values), valid(places)
    spatial = 2 if c.name.endswith("2d") else 3
    count = int(torch.tensor(x.shape[-spatial:]).prod())
    kernel = list(c["kernel_size"])
    # In an input that counts up, the last element of a window is its maximum.
    counting = torch.arange(float(count), dtype=torch.float64).reshape(x.shape[-spatial:]).expand(x.shape).contiguous()
    _, last = c.op(counting, kernel, c["output_size"], samples.data.to(torch.float64))
    flat, mask = x.data.flatten(-spatial).flatten(0, -2), x.mask.flatten(-spatial).flatten(0, -2)
    sizes = x.shape[-spatial:]
    found, at, known = [], [], []
    mask = mask & samples.mask.reshape(len(mask), -1).all(1, keepdim=True)  # a window that nobody knows has nothing
    for plane, plane_mask, ends in zip(flat, mask, last.flatten(-spatial).flatten(0, -2).tolist(), strict=True):
        for end in ends:
            corner = [int(i) for i in torch.unravel_index(torch.tensor(end), sizes)]
            spans = [torch.arange(i - k + 1, i + 1) for i, k in zip(corner, kernel, strict=True)]
            window = torch.zeros((), dtype=torch.int64)
            for span, size in zip(spans, sizes, strict=True):
                window = window.unsqueeze(-1) * size + span
            kept = window.reshape(-1)[plane_mask[window.reshape(-1)]]
            known.append(bool(len(kept)))
            best = int(plane.detach()[kept].argmax()) if len(kept) else 0
            found.append(plane[kept[best]] if len(kept) else plane.detach()[0])
            at.append(int(kept[best]) if len(kept) else 0)
    valid_at = torch.tensor(known, dtype=torch.bool).reshape(values.shape)
    return (
        Slot(torch.stack(found).reshape(values.shape).to(values.dtype), valid_at),
        Slot(torch.tensor(at).reshape(places.shape), valid_at),
    )
