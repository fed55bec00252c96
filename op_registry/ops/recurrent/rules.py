"""Recurrent networks: lstm, gru, rnn_tanh and rnn_relu, on padded and on packed sequences, and their cells.

Law: a scan over time. A step of a row is valid where at least one of its features is; its products sum over the valid
features, as in any contraction. An invalid step leaves the state unchanged, so that outputs at valid steps are torch's
on the row with its invalid steps removed, in both directions and in every layer. `h_n` and `c_n` are the state after
the last valid step, invalid for a row without one, even if the caller gave an initial state. (Between chunks of a
sequence, pass on ``torch.where(h_n.get_mask(), h_n, h_0)``.) An output is valid where its step is. An invalid element
of the initial state counts as 0, torch's default, and makes no output invalid. The dropout between layers draws a
number for every position, and of packed sequences for every packed step.

Law of cells: a cell is one such step. Its result is the new state where the step is valid, and elsewhere the old state
with its validity. So a loop over a cell gives the same results as the layer.

Law of parameters: invalid weights and biases follow the law of contractions, unit by unit. A unit takes a step where
each of its gates has a pair of valid factors in both products, and valid biases. Elsewhere it keeps its state, its
output is invalid, and a projection (`proj_size`) leaves this output out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.authoring import (
    RECURRENT,
    Bound,
    ByArgument,
    Dense,
    Equation,
    NotLowered,
    Permuted,
    Sparse,
    Unknown,
    aligned_validity,
    all_valid,
    as_bool,
    as_int8,
    autocast_on,
    by_rule,
    intersect,
    masked_rule,
    on_call,
    packet_name,
    results_like,
    shown,
)
from op_registry.ops.recurrent.packing import known_sizes
from op_registry.records.dense import map_tensors
from op_registry.records.layout import expand_validity
from op_registry.records.slices import arange_along, valid_first_positions
from op_registry.records.sums import product_validity, transposed
from op_registry.records.validity import unite
from op_registry.sparse.convert import without_invalid
from op_registry.sparse.permuted import groups_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Network:
    """One of torch's recurrent networks.

    layer  its operator on sequences
    cell   its operator on one step
    gates  how many gates (linear maps of input and state) a hidden unit has
    quiet  for each gate the sign of a weight that stops a step from having an effect; empty if none is needed
    """

    layer: OpOverloadPacket
    cell: OpOverload
    gates: int
    quiet: tuple[int, ...] = ()

    def scan(self, x: Tensor, state: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> list[Tensor]:
        """Outputs and last state of the layer, from torch's kernel."""
        return list(self.layer.input(x, _state_argument(state), params, *options))

    def step(self, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None]) -> list[Tensor]:
        """The state after one step."""
        result = self.cell(x, _state_argument(state), *weights)
        return [result] if isinstance(result, Tensor) else list(result)


def _state_argument(state: Sequence[Tensor]) -> Any:
    """A state as operators take it: a list of two for lstm, a tensor for the others."""
    return list(state) if len(state) > 1 else state[0]


# After its last step, an lstm keeps its memory (input gate closed, forget gate open), and a relu gives 0.
LSTM = Network(aten.lstm, aten.lstm_cell.default, gates=4, quiet=(-1, 1, 0, 0))
GRU = Network(aten.gru, aten.gru_cell.default, gates=3)
RNN_TANH = Network(aten.rnn_tanh, aten.rnn_tanh_cell.default, gates=1)
RNN_RELU = Network(aten.rnn_relu, aten.rnn_relu_cell.default, gates=1, quiet=(-1,))
NETWORKS = {packet_name(network.layer): network for network in (LSTM, GRU, RNN_TANH, RNN_RELU)}


def network_of(op: OpOverload) -> Network:
    """The network that a layer's or a cell's overload belongs to."""
    return NETWORKS[packet_name(op).removesuffix("_cell")]


def zero_filled(value: Any) -> Any:
    """Arguments with records replaced by their data, invalid elements filled with 0."""
    return map_tensors(lambda record: record.filled(0), value, Dense)


def step_validity(network: Network, x: Dense, weights: Sequence[Dense | None]) -> Tensor | None:
    """Where a step is valid for a unit: (…, 1) or (…, units), None for everywhere.

    `weights` are those of the input and of the state, and biases.
    """
    if all_valid(*weights):
        return x.any_valid(-1, keepdim=True)
    w_ih, w_hh, *biases = weights
    assert w_ih is not None
    assert w_hh is not None
    gates = intersect(product_validity(x, transposed(w_ih)), w_hh.any_valid(-1))
    for bias in biases:
        gates = intersect(gates, None if bias is None else bias.validity)
    if gates is None:
        return None
    return as_bool(gates).expand(*x.shape[:-1], w_ih.shape[0]).unflatten(-1, (network.gates, -1)).all(-2)


# ---------------------------------------------------------------------------------- one layer in one direction, by rows


@dataclass(frozen=True)
class Steps:
    """Which steps of each row of a batch (T, B, …) are valid, and the order in which they run.

    validity   in the shape of results (T or 1, B or 1, 1); None where all are valid
    valid      the same (T, B), bool
    count      the number of valid steps of each row (B)
    positions  the position of each step when valid steps come first, in the order in which they run (T, B)
    """

    validity: Tensor | None
    valid: Tensor
    count: Tensor
    positions: Tensor

    @classmethod
    def of(cls, x: Dense) -> Steps:
        """The steps of a layer's input."""
        validity = x.any_valid(-1, keepdim=True)
        flags = x.data.new_ones((), dtype=torch.int8) if validity is None else as_int8(validity).squeeze(-1)
        flags = flags.expand(x.shape[:2])
        return cls(validity, as_bool(flags), flags.sum(0, dtype=torch.int64), valid_first_positions(flags, 0))

    def reversed(self) -> Steps:
        """The same steps, run from the last to the first."""
        positions = torch.where(self.valid, self.count - 1 - self.positions, self.positions)
        return Steps(self.validity, self.valid, self.count, positions)

    def in_order(self, x: Tensor) -> Tensor:
        """The steps (T, B, features) in the order in which they run, invalid ones last."""
        steps = arange_along(len(x), 0, self.positions).expand_as(self.positions)
        return _rows(x, torch.zeros_like(self.positions).scatter(0, self.positions, steps))

    def in_input_order(self, x: Tensor) -> Tensor:
        """The inverse of `in_order`."""
        return _rows(x, self.positions)

    def last(self, x: Tensor) -> Tensor:
        """The results after the last valid step of each row (B, features), from results in running order."""
        return _rows(x, (self.count.clamp(min=1) - 1).unsqueeze(0)).squeeze(0)

    def past_end(self, dtype: torch.dtype) -> Tensor:
        """0 for each valid step and 1 after the last one, in running order (T, B, 1)."""
        return (arange_along(len(self.positions), 0, self.positions) >= self.count).to(dtype).unsqueeze(-1)

    @property
    def exists(self) -> Tensor:
        """Validity of a state (B, units)."""
        return as_int8(self.count > 0).unsqueeze(-1)


def _rows(x: Tensor, steps: Tensor) -> Tensor:
    """``x[steps[s, b], b]`` for every s and b. It moves whole rows, much faster than gathering elements."""
    batch = x.shape[1]
    rows = steps * batch + torch.arange(batch, device=x.device)
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, steps.shape)


def by_rows(
    network: Network, x: Dense, steps: Steps, state: list[Tensor], weights: list[Dense], has_biases: bool, train: bool
) -> tuple[Dense, list[Dense]]:
    """With all-valid weights: torch's kernel on the valid steps, moved to the front.

    The kernel runs to the end of the longest row. Steps past a row's last valid one must have no effect: neither on an
    lstm's memory, which the kernel returns for the very end only, nor by an overflow, which backward would turn into
    0 · ∞. So these steps set an additional feature, which has the network's `quiet` weights.
    """
    data, params = steps.in_order(x.filled(0)), [w.data for w in weights]
    if network.quiet:
        data = torch.cat([data, steps.past_end(data.dtype)], -1)
        ones = data.new_ones((params[0].shape[0] // network.gates, 1))
        quiet = torch.cat([ones * (sign * _strength(data)) for sign in network.quiet])
        params[0] = torch.cat([params[0], quiet.to(params[0].dtype)], -1)
    output, _, *memory = network.scan(
        data, [s.unsqueeze(0) for s in state], params, has_biases, 1, 0.0, train, False, False
    )
    final = [steps.last(output), *(c.squeeze(0) for c in memory)]
    return Dense(steps.in_input_order(output), steps.validity), [Dense(s, steps.exists) for s in final]


def _strength(x: Tensor) -> float:
    """A weight that outweighs all others, but whose product with a gradient stays finite in the computing dtype."""
    product_dtype = torch.get_autocast_dtype(x.device.type) if autocast_on(x.device) else x.dtype
    return 2.0**14 if torch.float16 in (x.dtype, product_dtype) else 2.0**60


# --------------------------------------------------------------------------------- one layer in one direction, by units


def by_units(
    network: Network, x: Dense, reverse: bool, state: list[Tensor], weights: list[Dense], has_biases: bool
) -> tuple[Dense, list[Dense]]:
    """With masked weights, where valid steps differ between units: step by step."""
    gate_weights = 4 if has_biases else 2
    validity = step_validity(network, x, weights[:gate_weights])
    units = (*x.shape[:2], state[-1].shape[-1])
    updates = (x.data.new_ones((), dtype=torch.bool) if validity is None else as_bool(validity)).expand(units)
    state_updates = [updates] * len(state)
    params, projection = zero_filled(weights[:gate_weights]), None
    if len(weights) > gate_weights:
        # The projected state (…, projections) enters the gates like additional features of the step.
        w_ih, w_hh, *biases = params
        params = [torch.cat([w_ih, w_hh], -1), w_hh.new_zeros((len(w_hh), units[-1])), *biases]
        projection = transposed(weights[-1])
        projected = product_validity(Dense(x.data.new_empty(()).expand(units), as_int8(updates)), projection)
        assert projected is not None
        state_updates[0] = as_bool(projected).expand(*units[:2], projection.shape[-1])
    data, outputs = x.filled(0), []
    for t in reversed(range(len(data))) if reverse else range(len(data)):
        if projection is None:
            new = network.step(data[t], state, params)
        else:
            new = network.step(torch.cat([data[t], state[0]], -1), [torch.zeros_like(state[1]), state[1]], params)
            new[0] = torch.where(updates[t], new[0], 0) @ projection.filled(0)
        state = [torch.where(u[t], n, s) for u, n, s in zip(state_updates, new, state, strict=True)]
        outputs.append(state[0])
    output = torch.stack(outputs[::-1] if reverse else outputs)
    last = [Dense(s, as_int8(u.any(0))) for s, u in zip(state, state_updates, strict=True)]
    return Dense(output, as_int8(state_updates[0])), last


# ------------------------------------------------------------------------------------------------------- whole networks


def stacked(c: Bound, x: Dense, drop: Callable[[Tensor], Tensor]) -> list[Dense]:
    """Outputs and last states of layers on steps (T, B, features); `drop` is the dropout between two layers."""
    network, directions = network_of(c.op), 2 if c.bidirectional else 1
    params_per_run = len(c.params) // (c.num_layers * directions)
    initial = [h.filled(0) for h in ([c.hx] if isinstance(c.hx, Dense) else c.hx)]
    last: list[list[Dense]] = []
    for layer in range(c.num_layers):
        if layer > 0:
            x = x.like(drop(x.data))
        outputs, steps = [], Steps.of(x)
        for n in range(layer * directions, (layer + 1) * directions):
            start, weights = [s[n] for s in initial], list(c.params[n * params_per_run : (n + 1) * params_per_run])
            reverse = n % directions == 1
            if all_valid(*weights):
                order = steps.reversed() if reverse else steps
                output, state = by_rows(network, x, order, start, weights, c.has_biases, c.train)
            else:
                output, state = by_units(network, x, reverse, start, weights, c.has_biases)
            outputs.append(output)
            last.append(state)
        x = by_rule(aten.cat.default, outputs, -1) if c.bidirectional else outputs[0]
    return [x, *(by_rule(aten.stack.default, states) for states in zip(*last, strict=True))]


def on_padded(c: Bound) -> Any:
    """Over the valid steps; the operator itself if all are valid, or if there are none, as torch then decides."""
    if all_valid(c.input, *c.params) or 0 in c.input.shape[:2]:
        return results_like(c.map(zero_filled, Dense).applied(c.op), None)

    def drop(x: Tensor) -> Tensor:
        return torch.dropout(x, c.dropout, c.train)

    output, *last = stacked(c, _time_first(c.input) if c.batch_first else c.input, drop)
    return (_time_first(output) if c.batch_first else output, *last)


def _time_first(x: Dense) -> Dense:
    """The first two dimensions, time and batch, exchanged. Self-inverse."""
    v = aligned_validity(x)
    return Dense(x.data.transpose(0, 1), None if v is None else v.transpose(0, 1))


def on_packed(c: Bound) -> Any:
    """Packed sequences are padded with invalid steps."""
    data, sizes = c.data, known_sizes(c.op, c.batch_sizes)
    if all_valid(data, *c.params):
        return results_like(c.with_(batch_sizes=sizes).map(zero_filled, Dense).applied(c.op), None)

    def padded(x: Tensor) -> Tensor:
        return aten._pad_packed_sequence(x, sizes, False, 0, len(sizes))[0]

    def packed(x: Tensor) -> Tensor:
        return aten._pack_padded_sequence(x, lengths, False)[0]

    def drop(x: Tensor) -> Tensor:
        # As in torch, random numbers are drawn for packed steps only.
        return padded(torch.dropout(packed(x), c.dropout, c.train)) if c.dropout and c.train else x

    v = aligned_validity(data)
    v = (
        data.data.new_ones((), dtype=torch.int8).expand(len(data.data), 1)
        if v is None
        else expand_validity(v, data.shape, [0])
    )
    lengths = aten._pad_packed_sequence(v, sizes, False, 0, len(sizes))[1]
    output, *last = stacked(c, Dense(padded(data.filled(0)), padded(v)), drop)
    validity = aligned_validity(output)
    assert validity is not None
    return (Dense(packed(output.data), packed(expand_validity(validity, output.shape, [0, 1]))), *last)


# A step reads those before it; the state of a layer, those below it.
LSTM_STEPS = ByArgument(
    "batch_first",
    Equation("*ti,L*K,?->*tO,L*H,L*C", scanned="t"),
    Equation("t*i,L*K,?->t*O,L*H,L*C", scanned="t"),
)
STEPS = ByArgument(
    "batch_first", Equation("*ti,L*H,?->*tO,L*H", scanned="t"), Equation("t*i,L*H,?->t*O,L*H", scanned="t")
)
PACKED_STEPS = Unknown("the steps of all sequences lie in one dimension")
lstm = masked_rule(aten.lstm.input, category=RECURRENT, takes_call=True, dims=LSTM_STEPS)(on_padded)
gru = masked_rule(aten.gru.input, category=RECURRENT, takes_call=True, dims=STEPS)(on_padded)
rnn_tanh = masked_rule(aten.rnn_tanh.input, category=RECURRENT, takes_call=True, dims=STEPS)(on_padded)
rnn_relu = masked_rule(aten.rnn_relu.input, category=RECURRENT, takes_call=True, dims=STEPS)(on_padded)
lstm_data = masked_rule(aten.lstm.data, category=RECURRENT, takes_call=True, dims=PACKED_STEPS)(on_packed)
gru_data = masked_rule(aten.gru.data, category=RECURRENT, takes_call=True, dims=PACKED_STEPS)(on_packed)
rnn_tanh_data = masked_rule(aten.rnn_tanh.data, category=RECURRENT, takes_call=True, dims=PACKED_STEPS)(on_packed)
rnn_relu_data = masked_rule(aten.rnn_relu.data, category=RECURRENT, takes_call=True, dims=PACKED_STEPS)(on_packed)


# ---------------------------------------------------------------------------------------------------------------- cells


def one_step(op: OpOverload, input: Dense, hx: Dense | Sequence[Dense], *weights: Dense | None) -> Any:
    """The new state where the step is valid, elsewhere the old one."""
    result = op(input.filled(0), zero_filled(hx), *zero_filled(weights))
    validity = step_validity(network_of(op), input, weights)
    if validity is None:
        return results_like(result, None)

    def updated(old: Dense, new: Tensor) -> Dense:
        data = torch.where(as_bool(validity), new, old.filled(0).to(new.dtype))
        return Dense(data, unite(validity, old.validity))

    if isinstance(hx, Dense):
        return updated(hx, result)
    return tuple(map(updated, hx, result))


# The old state, and of the parameters a block for each gate.
RNN_CELL = Equation("*i,*h,oi,oh,o,o->*o")
GRU_CELL = Equation("*i,*h,(go)i,(go)h,(go),(go)->*o", sizes={"g": 3})
LSTM_CELL = Equation("*i,*h,(go)i,(go)h,(go),(go)->*o,*o", sizes={"g": 4})
lstm_cell = masked_rule(aten.lstm_cell.default, category=RECURRENT, takes_op=True, dims=LSTM_CELL)(one_step)
gru_cell = masked_rule(aten.gru_cell.default, category=RECURRENT, takes_op=True, dims=GRU_CELL)(one_step)
rnn_tanh_cell = masked_rule(aten.rnn_tanh_cell.default, category=RECURRENT, takes_op=True, dims=RNN_CELL)(one_step)
rnn_relu_cell = masked_rule(aten.rnn_relu_cell.default, category=RECURRENT, takes_op=True, dims=RNN_CELL)(one_step)


# -------------------------- packed batches: torch's kernels for packed sequences, which take the same rows step by step

# Steps that are not stored are invalid, and an invalid step leaves the state unchanged; so each sequence runs over its
# stored rows. Dropout between layers is drawn for the padded batch, as on dense storage.

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
        on_host = x.pattern.lengths()  # torch takes the sizes of steps on the CPU
        non_empty = sum(n > 0 for n in on_host)
        sequence = x.pattern.coordinates()[0]
        step = torch.arange(len(sequence), device=x.device) - starts[sequence]
        longest_first = lengths.argsort(descending=True, stable=True)
        rank = torch.empty_like(longest_first)
        rank[longest_first] = torch.arange(len(rank), device=x.device)
        order = (step * len(rank) + rank[sequence]).argsort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device)
        reached = torch.arange(max(on_host, default=0))[:, None] < torch.tensor(on_host, dtype=torch.int64)
        return cls(
            order,
            place,
            reached.sum(1),
            longest_first[:non_empty],
            None if non_empty == len(on_host) else as_int8(lengths > 0).reshape(1, -1, 1),
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


for _rule in (lstm, gru, rnn_tanh, rnn_relu):
    _rule.lowering(Sparse)(on_rows)
    _rule.lowering(Permuted)(on_rows)
