"""Dropout on packed batches, drawn for the padded batch.

Storage does not change the stream of random numbers: every place of the padded batch draws, and the stored rows take
what was drawn in theirs (docs/semantics.md). Only packed storage promises that the padded batch is of a bearable size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import PACKED, NotLowered, Permuted, Sparse
from op_registry.ops.random import rules as random

aten = torch.ops.aten


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


@random.dropout.lowering(Permuted)
def dropout_of_permuted(op: OpOverload, input: Any, p: float, train: bool) -> Any:
    """torch draws in the order in which the elements of a permuted tensor lie in memory, which is the base's."""
    if op is not aten.dropout.default:
        raise NotLowered("it draws a random number for every channel, stored or not")
    return input.like(dropout(op, input.base, p, train))
