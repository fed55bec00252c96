"""Recurrent networks: lstm, gru, rnn_tanh and rnn_relu, on padded and on packed sequences, and their cells.

Law: a scan over time. A step is there for a row where at least one of its features is valid; its products sum over
the valid ones, as any contraction. An invalid step carries the state unchanged, so that outputs at valid steps are what
torch gives on the row with its invalid steps removed, in both directions and in every layer; `h_n` and `c_n` are the
state after the last valid step, invalid for a row without one. An output is valid where the step's input is. An invalid
element of the initial state counts as 0, which is what torch takes where no state is given.

A cell is one step of this. Its result is the state: the new one where the step is there, elsewhere the old one, as
valid as it was. So a loop over a cell gives what the layer gives.

Invalid weights and biases follow the law of contractions, unit by unit: a step is there for a unit where each of its
gates has a pair of valid factors in both products, and valid biases.
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
    Dense,
    aligned_validity,
    all_valid,
    arange_along,
    as_bool,
    as_int8,
    autocast_on,
    by_rule,
    expand_validity,
    intersect,
    map_tensors,
    masked_rule,
    packet_name,
    product_validity,
    results_like,
    transposed,
    unite,
    valid_first_positions,
)
from op_registry.ops.recurrent.packing import known_sizes

aten = torch.ops.aten
Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Network:
    """One of torch's recurrent networks.

    layer  its operator on sequences
    cell   its operator on one step
    gates  how many gates (linear maps of input and state) a hidden unit has
    quiet  for each gate the sign of a weight that keeps a step from leaving a trace; empty where it cannot leave one
    """

    layer: OpOverloadPacket
    cell: OpOverload
    gates: int
    quiet: tuple[int, ...] = ()

    def scan(self, x: Tensor, state: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> list[Tensor]:
        """Outputs and last state of the layer, by torch's own kernel."""
        return list(self.layer.input(x, _as_given(state), params, *options))

    def step(self, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None]) -> list[Tensor]:
        """The state after one step."""
        result = self.cell(x, _as_given(state), *weights)
        return [result] if isinstance(result, Tensor) else list(result)


def _as_given(state: Sequence[Tensor]) -> Any:
    """A state as operators take it: lstm's pair as a list, the others' tensor by itself."""
    return list(state) if len(state) > 1 else state[0]


# Past its last step, an lstm keeps its memory (input gate shut, forget gate open), a relu gives 0.
LSTM = Network(aten.lstm, aten.lstm_cell.default, gates=4, quiet=(-1, 1, 0, 0))
GRU = Network(aten.gru, aten.gru_cell.default, gates=3)
RNN_TANH = Network(aten.rnn_tanh, aten.rnn_tanh_cell.default, gates=1)
RNN_RELU = Network(aten.rnn_relu, aten.rnn_relu_cell.default, gates=1, quiet=(-1,))
NETWORKS = {packet_name(network.layer): network for network in (LSTM, GRU, RNN_TANH, RNN_RELU)}


def network_of(op: OpOverload) -> Network:
    """The network that a layer's or a cell's overload belongs to."""
    return NETWORKS[packet_name(op).removesuffix("_cell")]


def zero_filled(value: Any) -> Any:
    """Arguments with 0 in the place of what is invalid."""
    return map_tensors(lambda record: record.filled(0), value, Dense)


def there(network: Network, x: Dense, weights: Sequence[Dense | None]) -> Tensor | None:
    """Where a step is there for a unit: (…, 1) or (…, units), None for everywhere.

    weights  of the input, of the state, and biases
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
    """Which steps of each row of a batch (T, B, …) there are, and where they stand.

    validity  as results have it (T or 1, B or 1, 1); None where all are there
    here      the same (T, B), bool
    count     how many each row has (B)
    places    the place of each step when those that are there stand in front, in the order in which they run (T, B)
    """

    validity: Tensor | None
    here: Tensor
    count: Tensor
    places: Tensor

    @classmethod
    def of(cls, x: Dense) -> Steps:
        """The steps of a layer's input."""
        validity = x.any_valid(-1, keepdim=True)
        flags = x.data.new_ones((), dtype=torch.int8) if validity is None else as_int8(validity).squeeze(-1)
        flags = flags.expand(x.shape[:2])
        return cls(validity, as_bool(flags), flags.sum(0, dtype=torch.int64), valid_first_positions(flags, 0))

    def reversed(self) -> Steps:
        """The same steps, run from the last to the first."""
        places = torch.where(self.here, self.count - 1 - self.places, self.places)
        return Steps(self.validity, self.here, self.count, places)

    def in_order(self, x: Tensor) -> Tensor:
        """The steps (T, B, features) in the order in which they are run, those that are not there at the end."""
        steps = arange_along(len(x), 0, self.places).expand_as(self.places)
        return _rows(x, torch.zeros_like(self.places).scatter(0, self.places, steps))

    def in_place(self, x: Tensor) -> Tensor:
        """What was run in order, each step where it stood."""
        return _rows(x, self.places)

    def last(self, x: Tensor) -> Tensor:
        """What was run in order after the last step of each row (B, features)."""
        return _rows(x, (self.count.clamp(min=1) - 1).unsqueeze(0)).squeeze(0)

    def beyond(self, dtype: torch.dtype) -> Tensor:
        """1 for each place that has no step, 0 for the others (T, B, 1)."""
        return (arange_along(len(self.places), 0, self.places) >= self.count).to(dtype).unsqueeze(-1)

    @property
    def exists(self) -> Tensor:
        """Validity of a state (B, units)."""
        return as_int8(self.count > 0).unsqueeze(-1)


def _rows(x: Tensor, steps: Tensor) -> Tensor:
    """``x[steps[s, b], b]`` for every s and b: whole rows are moved, much quicker than to gather elements."""
    batch = x.shape[1]
    rows = steps * batch + torch.arange(batch, device=x.device)
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, steps.shape)


def by_rows(
    network: Network, x: Dense, steps: Steps, state: list[Tensor], weights: list[Dense], has_biases: bool, train: bool
) -> tuple[Dense, list[Dense]]:
    """With plain weights: the steps that are there, moved to the front, by torch's own kernel.

    The kernel goes on to the end of the longest row. That must leave no trace, neither in an lstm's memory, which it
    gives for the very end alone, nor by an overflow, of which backward would make 0 · ∞. So a step beyond the last one
    raises a further feature, which has the network's `quiet` weights.
    """
    data, params = steps.in_order(x.filled(0)), [w.data for w in weights]
    if network.quiet:
        data = torch.cat([data, steps.beyond(data.dtype)], -1)
        ones = data.new_ones((params[0].shape[0] // network.gates, 1))
        quiet = torch.cat([ones * (sign * _strength(data)) for sign in network.quiet])
        params[0] = torch.cat([params[0], quiet.to(params[0].dtype)], -1)
    output, _, *memory = network.scan(
        data, [s.unsqueeze(0) for s in state], params, has_biases, 1, 0.0, train, False, False
    )
    final = [steps.last(output), *(c.squeeze(0) for c in memory)]
    return Dense(steps.in_place(output), steps.validity), [Dense(s, steps.exists) for s in final]


def _strength(x: Tensor) -> float:
    """A weight that outweighs all others, and whose product with a gradient is finite in the dtype of the products."""
    narrow = torch.get_autocast_dtype(x.device.type) if autocast_on(x.device) else x.dtype
    return 2.0**14 if torch.float16 in (x.dtype, narrow) else 2.0**60


# --------------------------------------------------------------------------------- one layer in one direction, by units


def by_units(
    network: Network, x: Dense, reverse: bool, state: list[Tensor], weights: list[Dense], has_biases: bool
) -> tuple[Dense, list[Dense]]:
    """With masked weights, where each unit has steps of its own: cell by cell."""
    of_gates = 4 if has_biases else 2
    here = there(network, x, weights[:of_gates])
    units = (*x.shape[:2], state[-1].shape[-1])
    computed = (x.data.new_ones((), dtype=torch.bool) if here is None else as_bool(here)).expand(units)
    kept = [computed] * len(state)
    params, projection = zero_filled(weights[:of_gates]), None
    if len(weights) > of_gates:
        # Of what is projected, the state (…, projections) enters the gates like further features of the step.
        w_ih, w_hh, *biases = params
        params = [torch.cat([w_ih, w_hh], -1), w_hh.new_zeros((len(w_hh), units[-1])), *biases]
        projection = transposed(weights[-1])
        validity = product_validity(Dense(x.data.new_empty(()).expand(units), as_int8(computed)), projection)
        assert validity is not None
        kept[0] = as_bool(validity).expand(*units[:2], projection.shape[-1])
    data, outputs = x.filled(0), []
    for t in reversed(range(len(data))) if reverse else range(len(data)):
        if projection is None:
            new = network.step(data[t], state, params)
        else:
            new = network.step(torch.cat([data[t], state[0]], -1), [torch.zeros_like(state[1]), state[1]], params)
            new[0] = torch.where(computed[t], new[0], 0) @ projection.filled(0)
        state = [torch.where(k[t], n, s) for k, n, s in zip(kept, new, state, strict=True)]
        outputs.append(state[0])
    output = torch.stack(outputs[::-1] if reverse else outputs)
    return Dense(output, as_int8(kept[0])), [Dense(s, as_int8(k.any(0))) for s, k in zip(state, kept, strict=True)]


# ------------------------------------------------------------------------------------------------------- whole networks


def stacked(
    network: Network,
    x: Dense,
    hx: Sequence[Dense],
    params: Sequence[Dense],
    has_biases: bool,
    num_layers: int,
    drop: Move,
    train: bool,
    bidirectional: bool,
) -> list[Dense]:
    """Outputs and last states of layers on steps (T, B, features); `drop` is what happens between two of them."""
    directions = 2 if bidirectional else 1
    runs = num_layers * directions
    each = len(params) // runs
    start = [h.filled(0) for h in hx]
    last: list[list[Dense]] = []
    for layer in range(num_layers):
        if layer > 0:
            x = x.like(drop(x.data))
        outputs, steps = [], Steps.of(x)
        for n in range(layer * directions, (layer + 1) * directions):
            begin, weights = [s[n] for s in start], list(params[n * each : (n + 1) * each])
            reverse = n % directions == 1
            if all_valid(*weights):
                order = steps.reversed() if reverse else steps
                output, state = by_rows(network, x, order, begin, weights, has_biases, train)
            else:
                output, state = by_units(network, x, reverse, begin, weights, has_biases)
            outputs.append(output)
            last.append(state)
        x = by_rule(aten.cat.default, outputs, -1) if bidirectional else outputs[0]
    return [x, *(by_rule(aten.stack.default, states) for states in zip(*last, strict=True))]


def on_padded(
    op: OpOverload,
    input: Dense,
    hx: Dense | Sequence[Dense],
    params: Sequence[Dense],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """The operator itself where no step is in doubt; also where there is none, of which it has its own to say."""
    if all_valid(input, *params) or 0 in input.shape[:2]:
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return results_like(op(input.filled(0), zero_filled(hx), zero_filled(params), *options), None)

    def drop(x: Tensor) -> Tensor:
        return torch.dropout(x, dropout, train)

    x = _turned(input) if batch_first else input
    state = [hx] if isinstance(hx, Dense) else hx
    output, *last = stacked(network_of(op), x, state, params, has_biases, num_layers, drop, train, bidirectional)
    return (_turned(output) if batch_first else output, *last)


def _turned(x: Dense) -> Dense:
    """Time and batch exchanged."""
    v = aligned_validity(x)
    return Dense(x.data.transpose(0, 1), None if v is None else v.transpose(0, 1))


def on_packed(
    op: OpOverload,
    data: Dense,
    batch_sizes: Dense,
    hx: Dense | Sequence[Dense],
    params: Sequence[Dense],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Any:
    """Packed sequences are padded, with steps that are not there."""
    sizes = known_sizes(op, batch_sizes)
    if all_valid(data, *params):
        options = (has_biases, num_layers, dropout, train, bidirectional)
        return results_like(op(data.data, sizes, zero_filled(hx), zero_filled(params), *options), None)

    def padded(x: Tensor) -> Tensor:
        result: Tensor = aten._pad_packed_sequence(x, sizes, False, 0, len(sizes))[0]
        return result

    def packed(x: Tensor) -> Tensor:
        result: Tensor = aten._pack_padded_sequence(x, lengths, False)[0]
        return result

    def drop(x: Tensor) -> Tensor:
        # Drawn for the steps that there are, as torch draws.
        return padded(torch.dropout(packed(x), dropout, train)) if dropout and train else x

    v = aligned_validity(data)
    v = (
        data.data.new_ones((), dtype=torch.int8).expand(len(data.data), 1)
        if v is None
        else expand_validity(v, data.shape, [0])
    )
    lengths = aten._pad_packed_sequence(v, sizes, False, 0, len(sizes))[1]
    x = Dense(padded(data.filled(0)), padded(v))
    state = [hx] if isinstance(hx, Dense) else hx
    output, *last = stacked(network_of(op), x, state, params, has_biases, num_layers, drop, train, bidirectional)
    validity = aligned_validity(output)
    assert validity is not None
    return (Dense(packed(output.data), packed(expand_validity(validity, output.shape, [0, 1]))), *last)


lstm = masked_rule(aten.lstm.input, category=RECURRENT, takes_op=True)(on_padded)
gru = masked_rule(aten.gru.input, category=RECURRENT, takes_op=True)(on_padded)
rnn_tanh = masked_rule(aten.rnn_tanh.input, category=RECURRENT, takes_op=True)(on_padded)
rnn_relu = masked_rule(aten.rnn_relu.input, category=RECURRENT, takes_op=True)(on_padded)
lstm_data = masked_rule(aten.lstm.data, category=RECURRENT, takes_op=True)(on_packed)
gru_data = masked_rule(aten.gru.data, category=RECURRENT, takes_op=True)(on_packed)
rnn_tanh_data = masked_rule(aten.rnn_tanh.data, category=RECURRENT, takes_op=True)(on_packed)
rnn_relu_data = masked_rule(aten.rnn_relu.data, category=RECURRENT, takes_op=True)(on_packed)

# ---------------------------------------------------------------------------------------------------------------- cells


def one_step(
    op: OpOverload,
    input: Dense,
    hx: Dense | Sequence[Dense],
    w_ih: Dense,
    w_hh: Dense,
    b_ih: Dense | None = None,
    b_hh: Dense | None = None,
) -> Any:
    """The new state where the step is there, elsewhere the old one."""
    weights = (w_ih, w_hh, b_ih, b_hh)
    result = op(input.filled(0), zero_filled(hx), *zero_filled(weights))
    here = there(network_of(op), input, weights)
    if here is None:
        return results_like(result, None)

    def stay(old: Dense, new: Tensor) -> Dense:
        data = torch.where(as_bool(here), new, old.filled(0).to(new.dtype))
        return Dense(data, unite(here, old.validity))

    if isinstance(hx, Dense):
        return stay(hx, result)
    return tuple(map(stay, hx, result))


lstm_cell = masked_rule(aten.lstm_cell.default, category=RECURRENT, takes_op=True)(one_step)
gru_cell = masked_rule(aten.gru_cell.default, category=RECURRENT, takes_op=True)(one_step)
rnn_tanh_cell = masked_rule(aten.rnn_tanh_cell.default, category=RECURRENT, takes_op=True)(one_step)
rnn_relu_cell = masked_rule(aten.rnn_relu_cell.default, category=RECURRENT, takes_op=True)(one_step)
