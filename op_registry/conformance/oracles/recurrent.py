"""Recurrent networks: each row by itself, without its invalid steps; with invalid weights, by the textbook formulas.

If every weight is valid, torch's own layer runs a row's valid steps, one layer and one direction at a time. Otherwise
each gate is a sum over valid elements, and a unit keeps its state if one of its gates has no valid elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, Refused, all_true, oracle, valid

aten = torch.ops.aten
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _new_state(name: str, x: Sequence[Tensor], h: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
    """The textbook formulas, applied to each gate's sums over the input and over the state."""
    if name == "lstm":
        i, f, g, o = (a + b for a, b in zip(x, h, strict=True))
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if name == "gru":
        r, z = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
        return [(1 - z) * (x[2] + r * h[2]).tanh() + z * state[0]]
    return [(x[0] + h[0]).tanh() if name == "rnn_tanh" else (x[0] + h[0]).relu()]


def _textbook_step(
    name: str, x: Expected, state: Sequence[Tensor], weights: Sequence[Expected], biases: Sequence[Expected]
) -> tuple[list[Tensor], list[Tensor]]:
    """One step of one row: the new state, and which of its units changed."""
    w_ih, w_hh = weights[:2]
    sums = [w_ih.filled(0) @ x.filled(0), w_hh.filled(0) @ state[0]]
    known = (w_ih.mask & x.mask).any(1) & w_hh.mask.any(1)
    for n, bias in enumerate(biases):
        sums[n] = sums[n] + bias.filled(0)
        known = known & bias.mask
    gates = GATES[name]
    units = torch.stack(known.chunk(gates)).all(0)
    new, changed = _new_state(name, sums[0].chunk(gates), sums[1].chunk(gates), state), [units] * len(state)
    if len(weights) > 2:
        pairs = weights[2].mask & units
        new[0] = torch.where(pairs, weights[2].filled(0), 0) @ torch.where(units, new[0], 0)
        changed[0] = pairs.any(1)
    return [torch.where(k, n, s) for k, n, s in zip(changed, new, state, strict=True)], changed


def _row(
    name: str, x: Expected, state: list[Tensor], params: list[Expected], has_biases: bool
) -> tuple[Expected, list[Expected]]:
    """One layer in one direction on one row (T, features)."""
    present = x.mask.any(1)
    width = state[0].shape[0]
    if all(p.all_valid for p in params):
        output, last = torch.zeros(len(present), width, dtype=x.data.dtype), state
        if bool(present.any()):
            hx = [s[None, None] for s in state]
            network, weights = getattr(aten, name).input, [p.data for p in params]
            steps = x.filled(0)[present][:, None]
            on_steps, *ends = network(
                steps, hx if name == "lstm" else hx[0], weights, has_biases, 1, 0.0, False, False, False
            )
            output = output.index_put((present,), on_steps[:, 0])
            last = [end[0, 0] for end in ends]
        states = [Expected(s, present.any().expand(s.shape)) for s in last]
        return Expected(output, present[:, None].expand(output.shape)), states
    biases = params[2:4] if has_biases else []
    matrices = [*params[:2], *params[2 + len(biases) :]]
    outputs, known = [], []
    ever = [torch.zeros(s.shape, dtype=torch.bool) for s in state]
    for data, mask in zip(x.data, x.mask, strict=True):
        state, changed = _textbook_step(name, Expected(data, mask), state, matrices, biases)
        outputs.append(state[0])
        known.append(changed[0])
        ever = [e | k for e, k in zip(ever, changed, strict=True)]
    return Expected(torch.stack(outputs), torch.stack(known)), [
        Expected(s, e) for s, e in zip(state, ever, strict=True)
    ]


def _stacked(parts: Sequence[Expected], dim: int) -> Expected:
    return Expected(torch.stack([x.data for x in parts], dim), torch.stack([x.mask for x in parts], dim))


def _joined(parts: Sequence[Expected]) -> Expected:
    return Expected(torch.cat([x.data for x in parts], -1), torch.cat([x.mask for x in parts], -1))


def _of_row(x: Expected, b: int) -> Expected:
    """The steps (T, features) of one row of (T, B, features)."""
    return x.map(lambda t: t[:, b])


def _flipped(x: Expected) -> Expected:
    return x.map(lambda t: t.flip(0))


def _network(c: Call, x: Expected, dropout: Callable[[Tensor], Tensor]) -> list[Expected]:
    """All layers on steps (T, B, features): outputs and last states."""
    state = c["hx"] if isinstance(c["hx"], (list, tuple)) else [c["hx"]]
    directions = 2 if c["bidirectional"] else 1
    params_per_layer = len(c["params"]) // (c["num_layers"] * directions)
    last: list[list[Expected]] = []
    for layer in range(c["num_layers"]):
        if layer and c["train"] and c["dropout"]:
            x = Expected(dropout(x.data), x.mask)
        outputs = []
        for direction in range(directions):
            n = layer * directions + direction
            params = list(c["params"][n * params_per_layer : (n + 1) * params_per_layer])
            rows, ends = [], []
            for b in range(x.shape[1]):
                row = _of_row(x, b)
                start = [s.filled(0)[n, b] for s in state]
                on_row, end = _row(c.name, _flipped(row) if direction else row, start, params, c["has_biases"])
                rows.append(_flipped(on_row) if direction else on_row)
                ends.append(end)
            outputs.append(_stacked(rows, 1))
            last.append([_stacked(per_row, 0) for per_row in zip(*ends, strict=True)])
        x = _joined(outputs)
    return [x, *(_stacked(ends, 0) for ends in zip(*last, strict=True))]


@oracle("lstm.input gru.input rnn_tanh.input rnn_relu.input")
def on_padded(c: Call) -> Any:
    x = c["input"]
    if c["batch_first"]:
        x = x.map(lambda t: t.transpose(0, 1))
    output, *last = _network(c, x, lambda t: torch.dropout(t, c["dropout"], True))
    if c["batch_first"]:
        output = output.map(lambda t: t.transpose(0, 1))
    return output, *last


def _step_and_row(batch_sizes: Expected) -> tuple[Tensor, Tensor]:
    """The step and the row of each packed element."""
    if not batch_sizes.all_valid:
        raise Refused("invalid lengths")
    coordinates = [(t, b) for t, size in enumerate(batch_sizes.data.tolist()) for b in range(size)]
    return torch.tensor([t for t, _ in coordinates]), torch.tensor([b for _, b in coordinates])


@oracle("lstm.data gru.data rnn_tanh.data rnn_relu.data")
def on_packed(c: Call) -> Any:
    x, coordinates = c["data"], _step_and_row(c["batch_sizes"])
    shape = tuple(int(index.max()) + 1 for index in coordinates)

    def padded(t: Tensor) -> Tensor:
        return torch.zeros(*shape, t.shape[1], dtype=t.dtype).index_put(coordinates, t)

    output, *last = _network(
        c,
        x.map(padded),
        lambda t: padded(torch.dropout(t[coordinates], c["dropout"], True)),
    )
    return output.map(lambda t: t[coordinates]), *last


@oracle("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def one_step(c: Call) -> Any:
    state = c["hx"] if isinstance(c["hx"], (list, tuple)) else [c["hx"]]
    x = c["input"]
    biases = [c[name] for name in ("b_ih", "b_hh") if c[name] is not None]
    rows = []
    for b in range(x.shape[0]):
        old = [s.filled(0)[b] for s in state]
        row = Expected(x.data[b], x.mask[b])
        new, changed = _textbook_step(c.name.removesuffix("_cell"), row, old, [c["w_ih"], c["w_hh"]], biases)
        rows.append([Expected(n, k | s.mask[b]) for n, k, s in zip(new, changed, state, strict=True)])
    results = tuple(_stacked(per_row, 0) for per_row in zip(*rows, strict=True))
    return results if len(results) > 1 else results[0]


@oracle("_pack_padded_sequence")
def pack(c: Call) -> Any:
    x, lengths = c["input"], c["lengths"]
    if not lengths.all_valid:
        raise Refused("invalid lengths")
    _, batch_sizes = c.plain()
    step, row = _step_and_row(valid(batch_sizes))
    coordinates = (row, step) if c["batch_first"] else (step, row)
    return x.map(lambda t: t[coordinates]), batch_sizes


@oracle("_pad_packed_sequence")
def pad(c: Call) -> Any:
    x, (step, row) = c["data"], _step_and_row(c["batch_sizes"])
    plain, lengths = c.plain()
    coordinates = (row, step) if c["batch_first"] else (step, row)
    padding = torch.full(plain.shape, c["padding_value"], dtype=plain.dtype)
    mask = torch.zeros(plain.shape, dtype=torch.bool)
    return Expected(padding.index_put(coordinates, x.data), mask.index_put(coordinates, x.mask)), lengths


@oracle("pad_sequence")
def pad_all(c: Call) -> Expected:
    steps = max(len(x.data) for x in c["sequences"])
    rows = []
    for x in c["sequences"]:
        padding = x.data.new_full((steps - len(x.data), *x.shape[1:]), c["padding_value"])
        order = slice(None, None, -1 if c["padding_side"] == "left" else 1)
        rows.append(Expected(torch.cat([x.data, padding][order]), torch.cat([x.mask, all_true(padding)][order])))
    return _stacked(rows, 0 if c["batch_first"] else 1)
