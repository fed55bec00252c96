"""Merging values with equal indices: one sort, then a segmented sum.

`unique` and `index_add` would make two passes over the values in random order. torch's embedding_bag makes one,
vectorized (`python -m benchmarks adagrad`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from op_registry.records.dtypes import accumulation_dtype, on_signed_bits
from op_registry.records.tracing import under_transform

aten = torch.ops.aten

# torch's CPU builds with fbgemm radix-sort integers from this length on, faster than a comparison sort of half as many.
RADIX_SORT_LENGTH = 2**15
HAS_RADIX_SORT = "fbgemm" in torch.backends.quantized.supported_engines


def merge_duplicates(index: Tensor, values: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The distinct indices in ascending order, int64 (m,), and the sum of the values of each, (m, *rest).

    index    (n,) int64 or int32, in any order
    values   (n, *rest), of any dtype; bool values are combined by logical or
    counted  bool (n,): which indices take part; None: all
    """
    ordered, order = sort_indices(index, counted)
    unique, counts = ordered.unique_consecutive(return_counts=True)
    shape = (unique.shape[0], *values.shape[1:])
    sum_dtype = accumulation_dtype(values.dtype)
    recorded = (torch.is_grad_enabled() and values.requires_grad) or under_transform()
    if recorded or sum_dtype not in (torch.float32, torch.float64) or 0 in shape:
        segment = torch.repeat_interleave(counts, output_size=order.shape[0])
        total = sums_of_rows(shape[0], segment, values[order])
    else:
        # embedding_bag reads the rows in the order of `order`, so that the values need not be permuted first.
        rows = values.reshape(values.shape[0], -1).to(sum_dtype)
        total = aten._embedding_bag_forward_only(rows, order, counts.cumsum(0) - counts)[0].reshape(shape)
    return unique.to(torch.int64), total.to(values.dtype)


def sums_of_rows(number: int, index: Tensor, values: Tensor) -> Tensor:
    """(number, *rest): the sum of the rows of `values` (n, *rest) at each index; bool values are combined by or."""

    def added(rows: Tensor) -> Tensor:
        dtype = torch.int64 if rows.dtype is torch.bool else accumulation_dtype(rows.dtype)
        total = rows.new_zeros((number, *rows.shape[1:]), dtype=dtype)
        return total.index_add(0, index, rows.to(dtype)).to(rows.dtype)

    return on_signed_bits(added, values)


def sort_indices(index: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The counted indices in ascending order, and where each of them was; a stable sort."""
    number = index.shape[0] if counted is None else int(counted.sum())
    if counted is not None or (index.device.type == "cpu" and number):
        known = index if counted is None else torch.where(counted, index, 0)
        bound = int(known.amax()) + 1 if known.shape[0] else 0  # indices that do not count sort behind all others
        index = known if counted is None else torch.where(counted, index, bound)
        if index.device.type == "cpu" and bound < 2**31:
            index = index.to(torch.int32)
            if HAS_RADIX_SORT and RADIX_SORT_LENGTH // 4 <= index.shape[0] < RADIX_SORT_LENGTH:
                index = torch.cat([index, index.new_full((RADIX_SORT_LENGTH - index.shape[0],), bound)])
    ordered, order = index.sort(stable=True)
    return ordered[:number], order[:number]
