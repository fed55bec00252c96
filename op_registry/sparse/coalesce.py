"""Merging what belongs to the same place: one sort, and sums of segments.

What `unique` and `index_add` do in two random passes over the values is done in one, which torch's embedding_bag
vectorises (`python -m benchmarks adagrad`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import under_transform

aten = torch.ops.aten

# From this length on, torch's CPU builds with fbgemm sort integers by radix: quicker than half as many by comparison.
BY_RADIX = 2**15
RADIX = "fbgemm" in torch.backends.quantized.supported_engines


def merge_duplicates(index: Tensor, values: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The distinct indices in ascending order, int64 (m,), and for each the sum of its values, (m, *rest).

    index    (n,) int64 or int32, in any order
    values   (n, *rest), of any dtype; bool is "or"
    counted  bool (n,): which of them take part; None: all
    """
    ordered, order = sort_indices(index, counted)
    listed, counts = ordered.unique_consecutive(return_counts=True)
    shape = (listed.shape[0], *values.shape[1:])
    dtype = values.dtype
    wide = torch.int64 if dtype is torch.bool else accumulation_dtype(dtype)
    recorded = (torch.is_grad_enabled() and values.requires_grad) or under_transform()
    if recorded or wide not in (torch.float32, torch.float64) or 0 in shape:
        which = torch.repeat_interleave(counts, output_size=order.shape[0])
        total = values.new_zeros(shape, dtype=wide).index_add(0, which, values[order].to(wide))
    else:
        # Sums of segments, of rows in the order of `order`: nothing is permuted first.
        rows = values.reshape(values.shape[0], -1).to(wide)
        total = aten._embedding_bag_forward_only(rows, order, counts.cumsum(0) - counts)[0].reshape(shape)
    return listed.to(torch.int64), total.to(dtype)


def sort_indices(index: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The indices that count in ascending order, equal ones in theirs, and where each of them was."""
    number = index.shape[0] if counted is None else int(counted.sum())
    if counted is not None or (index.device.type == "cpu" and number):
        known = index if counted is None else torch.where(counted, index, 0)
        behind = int(known.amax()) + 1 if known.shape[0] else 0  # what does not count is sorted to the end
        index = known if counted is None else torch.where(counted, index, behind)
        if index.device.type == "cpu" and behind < 2**31:
            index = index.to(torch.int32)
            if RADIX and BY_RADIX // 4 <= index.shape[0] < BY_RADIX:
                index = torch.cat([index, index.new_full((BY_RADIX - index.shape[0],), behind)])
    ordered, order = index.sort(stable=True)
    return ordered[:number], order[:number]
