"""Recurrent networks: each row alone, its missing steps taken out; and, where weights are missing, the textbook.

With whole weights a row's steps are run by torch's own layer, one layer and one direction at a time. With missing ones
each gate is a sum over what is there, and a unit of which a gate has nothing keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, Refused, Slot, oracle

aten = torch.ops.aten
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _new_state(name: str, x: Sequence[Tensor], h: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
    """The textbook's step, from each gate's sums over the input and over the state."""
    if name == "lstm":
        i, f, g, o = (a + b for a, b in zip(x, h, strict=True))
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if name == "gru":
        r, z = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
        return [(1 - z) * (x[2] + r * h[2]).tanh() + z * state[0]]
    return [(x[0] + h[0]).tanh() if name == "rnn_tanh" else (x[0] + h[0]).relu()]


def _textbook_step(
    name: str, x: Slot, state: Sequence[Tensor], weights: Sequence[Slot], biases: Sequence[Slot]
) -> tuple[list[Tensor], list[Tensor]]:
    """One step of one row: the new state, and which of its units have one."""
    w_ih, w_hh = weights[:2]
    sums = [w_ih.filled(0) @ x.filled(0), w_hh.filled(0) @ state[0]]
    known = (w_ih.mask & x.mask).any(1) & w_hh.mask.any(1)
    for n, bias in enumerate(biases):
        sums[n] = sums[n] + bias.filled(0)
        known = known & bias.mask
    gates = GATES[name]
    units = torch.stack(known.chunk(gates)).all(0)
    new, has = _new_state(name, sums[0].chunk(gates), sums[1].chunk(gates), state), [units] * len(state)
    if len(weights) > 2:
        pairs = weights[2].mask & units
        new[0] = torch.where(pairs, weights[2].filled(0), 0) @ torch.where(units, new[0], 0)
        has[0] = pairs.any(1)
    return [torch.where(k, n, s) for k, n, s in zip(has, new, state, strict=True)], has


def _row(name: str, x: Slot, state: list[Tensor], params: list[Slot], has_biases: bool) -> tuple[Slot, list[Slot]]:
    """One layer in one direction on one row (T, features)."""
    present = x.mask.any(1)
    width = state[0].shape[0]
    if all(p.all_valid for p in params):
        output, last = torch.zeros(len(present), width, dtype=x.data.dtype), state
        if bool(present.any()):
            hx = [s[None, None] for s in state]
            network, given = getattr(aten, name).input, [p.data for p in params]
            steps = x.filled(0)[present][:, None]
            made, *ends = network(
                steps, hx if name == "lstm" else hx[0], given, has_biases, 1, 0.0, False, False, False
            )
            output = output.index_put((present,), made[:, 0])
            last = [end[0, 0] for end in ends]
        whole = [present.any().expand(s.shape) for s in last]
        return Slot(output, present[:, None].expand(output.shape)), [
            Slot(s, m) for s, m in zip(last, whole, strict=True)
        ]
    biases = params[2:4] if has_biases else []
    weights = [*params[:2], *params[2 + len(biases) :]]
    outputs, known = [], []
    ever = [torch.zeros(s.shape, dtype=torch.bool) for s in state]
    for data, mask in zip(x.data, x.mask, strict=True):
        state, has = _textbook_step(name, Slot(data, mask), state, weights, biases)
        outputs.append(state[0])
        known.append(has[0])
        ever = [e | k for e, k in zip(ever, has, strict=True)]
    return Slot(torch.stack(outputs), torch.stack(known)), [Slot(s, e) for s, e in zip(state, ever, strict=True)]


def _stacked(slots: Sequence[Slot], dim: int) -> Slot:
    return Slot(torch.stack([s.data for s in slots], dim), torch.stack([s.mask for s in slots], dim))


def _joined(slots: Sequence[Slot]) -> Slot:
    return Slot(torch.cat([s.data for s in slots], -1), torch.cat([s.mask for s in slots], -1))


def _flipped(x: Slot) -> Slot:
    return Slot(x.data.flip(0), x.mask.flip(0))


def _network(c: Call, x: Slot, dropped: Callable[[Tensor], Tensor]) -> list[Slot]:
    """All layers on steps (T, B, features): outputs and last states."""
    state = c["hx"] if isinstance(c["hx"], (list, tuple)) else [c["hx"]]
    directions = 2 if c["bidirectional"] else 1
    each = len(c["params"]) // (c["num_layers"] * directions)
    last: list[list[Slot]] = []
    for layer in range(c["num_layers"]):
        if layer and c["train"] and c["dropout"]:
            x = Slot(dropped(x.data), x.mask)
        outputs = []
        for direction in range(directions):
            n = layer * directions + direction
            params = list(c["params"][n * each : (n + 1) * each])
            rows, ends = [], []
            for b in range(x.shape[1]):
                row = Slot(x.data[:, b], x.mask[:, b])
                start = [s.filled(0)[n, b] for s in state]
                made, end = _row(c.name, _flipped(row) if direction else row, start, params, c["has_biases"])
                rows.append(_flipped(made) if direction else made)
                ends.append(end)
            outputs.append(_stacked(rows, 1))
            last.append([_stacked(per_row, 0) for per_row in zip(*ends, strict=True)])
        x = _joined(outputs)
    return [x, *(_stacked(ends, 0) for ends in zip(*last, strict=True))]


@oracle("lstm.input gru.input rnn_tanh.input rnn_relu.input")
def on_padded(c: Call) -> Any:
    x = c["input"]
    if c["batch_first"]:
        x = Slot(x.data.transpose(0, 1), x.mask.transpose(0, 1))
    output, *last = _network(c, x, lambda t: torch.dropout(t, c["dropout"], True))
    if c["batch_first"]:
        output = Slot(output.data.transpose(0, 1), output.mask.transpose(0, 1))
    return output, *last


def _places(batch_sizes: Slot) -> tuple[Tensor, Tensor]:
    """The step and the row of each packed element."""
    if not batch_sizes.all_valid:
        raise Refused("invalid lengths")
    where = [(t, b) for t, size in enumerate(batch_sizes.data.tolist()) for b in range(size)]
    return torch.tensor([t for t, _ in where]), torch.tensor([b for _, b in where])


@oracle("lstm.data gru.data rnn_tanh.data rnn_relu.data")
def on_packed(c: Call) -> Any:
    x, places = c["data"], _places(c["batch_sizes"])
    shape = (int(places[0].max()) + 1, int(places[1].max()) + 1)

    def padded(t: Tensor) -> Tensor:
        return torch.zeros(*shape, t.shape[1], dtype=t.dtype).index_put(places, t)

    output, *last = _network(
        c,
        Slot(padded(x.data), padded(x.mask)),
        lambda t: padded(torch.dropout(t[places], c["dropout"], True)),
    )
    return Slot(output.data[places], output.mask[places]), *last


@oracle("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def one_step(c: Call) -> Any:
    state = c["hx"] if isinstance(c["hx"], (list, tuple)) else [c["hx"]]
    x = c["input"]
    biases = [c[name] for name in ("b_ih", "b_hh") if c[name] is not None]
    rows = []
    for b in range(x.shape[0]):
        old = [s.filled(0)[b] for s in state]
        row = Slot(x.data[b], x.mask[b])
        new, has = _textbook_step(c.name.removesuffix("_cell"), row, old, [c["w_ih"], c["w_hh"]], biases)
        rows.append([Slot(n, k | s.mask[b]) for n, k, s in zip(new, has, state, strict=True)])
    results = tuple(_stacked(per_row, 0) for per_row in zip(*rows, strict=True))
    return results if len(results) > 1 else results[0]


@oracle("_pack_padded_sequence")
def pack(c: Call) -> Any:
    x, lengths = c["input"], c["lengths"]
    if not lengths.all_valid:
        raise Refused("invalid lengths")
    _, batch_sizes = c.plainly()
    step, row = _places(Slot(batch_sizes, torch.ones(batch_sizes.shape, dtype=torch.bool)))
    places = (row, step) if c["batch_first"] else (step, row)
    return Slot(x.data[places], x.mask[places]), batch_sizes


@oracle("_pad_packed_sequence")
def pad(c: Call) -> Any:
    x, (step, row) = c["data"], _places(c["batch_sizes"])
    plain, lengths = c.plainly()
    places = (row, step) if c["batch_first"] else (step, row)
    padding = torch.full(plain.shape, c["padding_value"], dtype=plain.dtype)
    mask = torch.ones(plain.shape, dtype=torch.bool)
    return Slot(padding.index_put(places, x.data), mask.index_put(places, x.mask)), lengths


@oracle("pad_sequence")
def pad_all(c: Call) -> Slot:
    steps = max(len(x.data) for x in c["sequences"])
    rows = []
    for x in c["sequences"]:
        padding = x.data.new_full((steps - len(x.data), *x.shape[1:]), c["padding_value"])
        valid = torch.ones(padding.shape, dtype=torch.bool)
        order = slice(None, None, -1 if c["padding_side"] == "left" else 1)
        rows.append(Slot(torch.cat([x.data, padding][order]), torch.cat([x.mask, valid][order])))
    return _stacked(rows, 0 if c["batch_first"] else 1)
