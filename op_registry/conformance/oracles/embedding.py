"""Lookups of rows in an embedding table, and sums, means and maxima over bags of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, Refused, oracle, valid
from op_registry.conformance.oracles.engine import groups, reduce_groups


@oracle("embedding")
def embedding(c: Call) -> Expected:
    """A row of the weight, valid where the index and the row's elements are."""
    weight, indices = c["weight"], c["indices"]
    # Look up valid indices only, because scale_grad_by_freq counts each index that is looked up.
    kept = indices.mask.reshape(-1).nonzero()[:, 0]
    looked_up = c.plain(indices=indices.data.reshape(-1)[kept])
    plain = c.plain()
    data = plain.detach().reshape(-1, plain.shape[-1]).index_put((kept,), looked_up).reshape(plain.shape)
    rows = torch.where(indices.mask, indices.data, 0)
    return Expected(data, weight.mask[rows] & indices.mask.unsqueeze(-1))


@oracle("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(c: Call) -> Any:
    """Sum, mean or maximum of each bag's valid elements; torch's zeros for a bag that is empty or all padding."""
    weight, indices, offsets = c["weight"], c["indices"], c["offsets"]
    if not offsets.all_valid:
        raise Refused("embedding_bag with invalid offsets")
    plain = c.plain()
    starts = offsets.data.tolist()
    ends = [*starts[1:], indices.data.numel()] if not c["include_last_offset"] else starts[1:]
    padding = _padding_index(c, weight.shape[0])
    entries = _entries(c, weight, indices, c["per_sample_weights"])
    flat = torch.arange(entries.data.numel()).reshape(entries.shape)
    in_bags = (indices.mask & (indices.data == padding)).logical_not()
    columns = (
        flat[start:end][in_bags[start:end], column]
        for start, end in zip(starts, ends, strict=False)
        for column in range(weight.shape[1])
    )
    reduce: Callable[[Tensor], Tensor] = (torch.sum, torch.mean, torch.max)[c["mode"]]
    result = reduce_groups(groups([entries], columns), lambda group: reduce(group.values[0]), plain[0].detach())
    return (result, *map(valid, plain[1:]))


def _padding_index(c: Call, rows: int) -> int:
    """The index that bags ignore; -1 if there is none."""
    padding = c.get("padding_idx", -1)
    if padding is None:
        return -1
    return padding % rows if c.op._overloadname == "padding_idx" else padding


def _entries(c: Call, weight: Expected, indices: Expected, factors: Expected | None) -> Expected:
    """(indices, columns): the row of the weight at each index, times its per-sample weight."""
    rows = torch.where(indices.mask, indices.data, 0).to(torch.int64)
    data, mask = weight.data[rows], weight.mask[rows] & indices.mask[:, None]
    if c["scale_grad_by_freq"]:
        counts = torch.bincount(rows[indices.mask], minlength=weight.shape[0]).clamp(min=1)
        data = data.detach() + (data - data.detach()) / counts[rows][:, None]
    if factors is not None:
        data, mask = data * factors.data[:, None], mask & factors.mask[:, None]
    return Expected(data, mask)
