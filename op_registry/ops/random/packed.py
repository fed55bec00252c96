"""Dropout on packed batches, drawn for the padded batch.

Storage does not change the stream of random numbers: numbers are drawn for every element of the padded batch, and the
stored rows use theirs (rules.py). Only packed storage guarantees that the padded batch is of a moderate size.
"""

from __future__ import annotations

import torch

from op_registry.authoring import Bound, Dense, NotLowered, Permuted, Sparse, on_call, shown
from op_registry.ops.random import rules as random

aten = torch.ops.aten


@random.dropout.lowering(Sparse)
@random.dropout.lowering(Permuted)
@on_call
def dropout(c: Bound) -> Sparse | Permuted:
    """Draw random numbers for the whole padded batch; each stored row uses its own.

    torch draws in memory order, which for a permuted tensor is that of its base.
    """
    (input, _), p = shown(c.input), c.p
    if random.drops_nothing(p, c.train) or (0 <= p <= 1 and 0 in input.shape):
        return c.input  # type: ignore[no-any-return]
    by_channel = c.op is aten.feature_dropout.default and isinstance(c.input, Sparse)
    if not input.pattern.layout.of_sequences or not (by_channel or c.op is aten.dropout.default):
        raise NotLowered("it draws a random number for every element or channel, stored or not")
    values = _dropped(c, input)
    return c.input.like(values if isinstance(c.input, Sparse) else input.like(values))  # type: ignore[no-any-return]


def _dropped(c: Bound, input: Sparse) -> Dense:
    """The values of a packed record with the dropout that is drawn for the padded batch."""
    op, p, values = c.op, c.p, input.values.data
    if not 0 <= p < 1:
        return random.dropout.run(op, input.values, p, c.train)  # drops everything, or raises torch's error
    sizes = input.pattern.sizes
    dense = input.dense_sizes if op is aten.dropout.default else (1,) * len(input.dense_sizes)
    if values.device.type == "cpu":  # torch's steps on CPU, the last two for the stored rows alone
        padded = values.new_empty((*sizes, *dense)).bernoulli_(1 - p).flatten(0, 1)
        factors = padded.index_select(0, input.pattern.positions()).div_(1 - p)
    else:
        padded = aten.dropout(values.new_ones((*sizes, *dense)), p, True).flatten(0, 1)
        factors = padded.index_select(0, input.pattern.positions())
    return input.values.like(values * factors)
