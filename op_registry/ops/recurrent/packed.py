"""Recurrent networks on packed batches: torch's kernels for packed sequences, which take the same rows step by step.

Law: as in rules.py. Steps that are not stored are invalid, and an invalid step leaves the state unchanged; so each
sequence runs over its stored rows. Dropout between layers is drawn for the padded batch, as on dense storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import (
    Bound,
    Dense,
    NotLowered,
    Permuted,
    Sparse,
    all_valid,
    as_int8,
    groups_of,
    on_call,
    shown,
    without_invalid,
)
from op_registry.ops.recurrent import rules
from op_registry.ops.recurrent.rules import network_of, zero_filled

TIME_FIRST, TIME_SECOND = (1, 0, 2), (0, 1, 2)


@dataclass(frozen=True)
class StepByStep:
    """The rows of a packed batch in the order of torch's packed sequences: all first steps, all second steps, …

    order        the position of each of these rows among the stored ones
    place        the inverse: the position of each stored row
    batch_sizes  the number of sequences that have each step
    sequences    the sequences with a row, the longest first
    exists       validity of a state (1, B, 1); None if all sequences have a row
    """

    order: Tensor
    place: Tensor
    batch_sizes: Tensor
    sequences: Tensor
    exists: Tensor | None

    @classmethod
    def of(cls, x: Sparse) -> StepByStep:
        """The order for a packed batch, remembered with its pattern."""
        return x.pattern.cached("step by step", lambda: cls._of(x))

    @classmethod
    def _of(cls, x: Sparse) -> StepByStep:
        ends = x.pattern.ends()
        assert ends is not None
        starts, lengths = ends[:-1].to(torch.int64), ends.diff().to(torch.int64)
        sequence = x.pattern.coordinates()[0]
        step = torch.arange(len(sequence), device=x.device) - starts[sequence]
        longest_first = lengths.argsort(descending=True, stable=True)
        rank = torch.empty_like(longest_first)
        rank[longest_first] = torch.arange(len(rank), device=x.device)
        order = (step * len(rank) + rank[sequence]).argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        has_rows = lengths > 0
        return cls(
            order,
            place,
            step.bincount().cpu(),
            longest_first[: int(has_rows.sum())],
            None if bool(has_rows.all()) else as_int8(has_rows).reshape(1, -1, 1),
        )

    def state(self, of_sequences: Tensor) -> Dense:
        """A state (layers, B, units) from that of the sequences with a row."""
        if self.exists is None:
            return Dense(of_sequences.index_select(1, self.sequences.argsort()))
        shape = (of_sequences.shape[0], self.exists.shape[1], of_sequences.shape[2])
        return Dense(of_sequences.new_zeros(shape).index_copy(1, self.sequences, of_sequences), self.exists)


@on_call(packed="input", dense="hx, params", eager=True, elements=True)
def on_rows(c: Bound) -> Any:
    """The operator on the stored rows."""
    base, groups = shown(c.input)
    if groups != groups_of(TIME_SECOND if c.batch_first else TIME_FIRST):
        raise NotLowered("its input is not (B, T, features), or is packed along the batch")
    if not all_valid(*c.params):
        raise NotLowered("some weights are invalid")
    x, initial = without_invalid(base), list(c.hx) if isinstance(c.hx, (list, tuple)) else [c.hx]
    steps, data = StepByStep.of(x), x.values.filled(0)
    weights, state = zero_filled(list(c.params)), [s.index_select(1, steps.sequences) for s in zero_filled(initial)]
    batch_sizes, rows = steps.batch_sizes, data.index_select(0, steps.order)
    if not len(rows):  # torch refuses sequences without steps: we run one step of zeros, and drop its results
        rows, batch_sizes = data.new_zeros((1, *data.shape[1:])), torch.ones(1, dtype=torch.int64)
        state = [s.index_select(1, steps.sequences.new_zeros(1)) for s in zero_filled(initial)]

    def scan(rows: Tensor, number: int, state: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        given = state if len(state) > 1 else state[0]
        options = (c.has_biases, number, 0.0, c.train, c.bidirectional)
        return list(network_of(c.op).layer.data(rows, batch_sizes, given, weights, *options))

    if c.dropout and c.train and c.num_layers > 1:
        directions = 2 if c.bidirectional else 1
        per_layer = len(weights) // c.num_layers
        last: list[list[Tensor]] = []
        for n in range(c.num_layers):
            if n > 0:
                rows = rows * _dropout_factors(rows, x, c.dropout)
            of_layer = [s[n * directions : (n + 1) * directions] for s in state]
            rows, *final = scan(rows, 1, of_layer, weights[n * per_layer : (n + 1) * per_layer])
            last.append(final)
        states = [torch.cat(parts) for parts in zip(*last, strict=True)]
    else:
        rows, *states = scan(rows, c.num_layers, state, weights)
    output = x.like(Dense(rows[: len(steps.place)].index_select(0, steps.place)))
    if not len(data):
        states = [s[:, :0] for s in states]
    return (Permuted(output, TIME_FIRST) if isinstance(c.input, Permuted) else output, *map(steps.state, states))


def _dropout_factors(rows: Tensor, x: Sparse, dropout: float) -> Tensor:
    """The factors of dropout for a layer's rows, step by step; drawn for the padded batch (T, B, units)."""
    batch, time = x.pattern.sizes
    drawn = torch.dropout(rows.new_ones((time, batch, rows.shape[-1])), dropout, True)
    if not x.pattern.stored:
        return rows.new_ones(())
    order = StepByStep.of(x).order
    sequence, step = (c[order] for c in x.pattern.coordinates())
    return drawn.flatten(0, 1).index_select(0, step * batch + sequence)


for _rule in (rules.lstm, rules.gru, rules.rnn_tanh, rules.rnn_relu):
    _rule.lowering(Sparse)(on_rows)
    _rule.lowering(Permuted)(on_rows)
