"""Dropout on packed batches, drawn for the padded batch.

Storage does not change the stream of random numbers: numbers are drawn for every element of the padded batch, and the
stored rows use theirs (docs/semantics.md). Only packed storage guarantees that the padded batch is of a moderate size.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from op_registry.authoring import NotLowered, Permuted, Sparse
from op_registry.ops.random import rules as random

aten = torch.ops.aten


@random.dropout.lowering(Sparse)
def dropout(op: OpOverload, input: Sparse, p: float, train: bool) -> Sparse:
    """Draw random numbers for the whole padded batch; each stored row uses its own."""
    if 0 <= p <= 1 and (p == 0 or not train or 0 in input.shape):
        return input
    if not input.pattern.layout.of_sequences or op not in (aten.dropout.default, aten.feature_dropout.default):
        raise NotLowered("it draws a random number for every element, stored or not")
    if not 0 <= p < 1:
        return input.like(random.dropout.run(op, input.values, p, train))  # drops everything, or raises torch's error
    sizes = input.pattern.sizes
    dense = input.dense_sizes if op is aten.dropout.default else (1,) * len(input.dense_sizes)
    values = input.values.data
    if values.device.type == "cpu":  # torch's steps on CPU, the last two for the stored rows alone
        padded = values.new_empty((*sizes, *dense)).bernoulli_(1 - p).flatten(0, 1)
        factors = padded.index_select(0, input.pattern.positions()).div_(1 - p)
    else:
        padded = aten.dropout(values.new_ones((*sizes, *dense)), p, True).flatten(0, 1)
        factors = padded.index_select(0, input.pattern.positions())
    return input.like(input.values.like(values * factors))


@random.dropout.lowering(Permuted)
def dropout_of_permuted(op: OpOverload, input: Permuted, p: float, train: bool) -> Permuted:
    """torch draws in memory order, which for a permuted tensor is that of the base."""
    if op is not aten.dropout.default:
        raise NotLowered("it draws a random number for every channel, stored or not")
    return input.like(dropout(op, input.base, p, train))
