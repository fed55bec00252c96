"""Whole slices: plain torch on each slice alone, if nothing in it is missing.

This loops over the slices of a batch, and skips incomplete slices instead of filling them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, Misdeclared, Refused, all_true, oracle, valid
from op_registry.conformance.sample import tensors_of, tree_map
from op_registry.dimensions.equation import Equation
from op_registry.dimensions.labels import Dimension, Labels, batch_labels
from op_registry.registry import registry


def by_slice(plain: Tensor, batch: int, one: Callable[[tuple[int, ...]], Tensor | None]) -> Expected:
    """A result whose first `batch` dimensions number the slices; `one` computes the result of each slice.

    `one` returns None for an invalid slice. We only use the shape and the dtype of `plain`.
    """
    if not plain.numel():
        return valid(torch.empty(plain.shape, dtype=plain.dtype))
    pieces, masks = [], []
    for index in itertools.product(*(range(size) for size in plain.shape[:batch])):
        piece = one(index)
        masks.append(torch.full(plain.shape[batch:], piece is not None))
        pieces.append(torch.zeros(plain.shape[batch:]) if piece is None else piece)
    pieces = [piece.to(plain.dtype) for piece in pieces]
    return Expected(torch.stack(pieces).reshape(plain.shape), torch.stack(masks).reshape(plain.shape))


def without_values(c: Call) -> Any:
    """Results of the right shapes and dtypes, without running the operator: hidden data may be outside its domain.

    If torch cannot infer them (on meta tensors), this runs the operator.
    """
    try:
        return c.run({}, lambda operand: operand.data.detach().to("meta"))
    except (NotImplementedError, RuntimeError):
        return c.plain()


def like_results(plain: Any, expected: Sequence[Expected]) -> Any:
    """The expected results in the structure of plain torch's."""
    found = iter(expected)
    return tree_map(lambda leaf: next(found) if isinstance(leaf, Tensor) else leaf, plain)


def of_labels(c: Call, labels: Labels, reads: Callable[[int], Collection[str]] | None = None) -> Any:
    """The operator on one slice at a time: whole along labels with a role, and at one index along all others.

    reads  the operands on which a result depends, by its number; all, if it is not said
    """
    plain = without_values(c)
    of_each = (
        _of_result(c, labels, n, out, None if reads is None else reads(n)) for n, out in enumerate(tensors_of(plain))
    )
    return like_results(plain, list(of_each))


def _of_result(c: Call, labels: Labels, number: int, plain: Tensor, read: Collection[str] | None) -> Expected:
    if not plain.numel():
        return valid(torch.empty(plain.shape, dtype=plain.dtype))
    own = labels.results[number]
    batch = [d for d, label in enumerate(own) if label not in labels.roles]
    front, slice_shape = list(range(len(batch))), [plain.shape[d] for d in range(plain.ndim) if d not in batch]

    def one(index: tuple[int, ...]) -> Tensor | None:
        place = dict(zip((own[d] for d in batch), index, strict=True))
        alone = {name: _at(c[name], dims, place, labels) for name, dims in labels.operands.items()}
        whole = all(operand.all_valid for name, operand in alone.items() if read is None or name in read)
        return tensors_of(c.plain(**alone))[number].reshape(slice_shape) if whole else None

    return by_slice(plain.movedim(batch, front), len(batch), one).map(lambda t: t.movedim(front, batch))


def _at(operand: Expected, dims: Sequence[Dimension], place: Mapping[Dimension, int], labels: Labels) -> Expected:
    """The operand's slice at an index of the result's labels, to which it broadcasts; of others, the first."""
    starts = [
        None if label in labels.roles else place.get(label, 0) * (size != 1)
        for label, size in zip(dims, operand.shape, strict=True)
    ]
    own = tuple(slice(None) if start is None else slice(start, start + 1) for start in starts)
    return operand.map(lambda t: t[own])


def of_slices(c: Call, reads: Callable[[int], Collection[str]] | None = None) -> Any:
    """The same, by the dimensions that the rule states."""
    rule = registry.get(c.op)
    labels = None if rule is None or rule.dims is None else rule.dims.labels(c.op, c.bound)
    if labels is None:
        raise Misdeclared(f"{c.name} takes operands of {[x.ndim for x in c.operands()]} dimensions, not as stated")
    return of_labels(c, labels, reads)


def of_matrices(c: Call, operand: str) -> Any:
    """The operator on one matrix at a time, of an operand that is a batch of them."""
    batch = batch_labels(max(c[operand].ndim - 2, 0))
    own = tuple((*batch, *range(out.ndim - len(batch))) for out in tensors_of(without_values(c)))
    return of_labels(c, Labels({operand: (*batch, "M", "N")}, own, dict.fromkeys(("M", "N", 0, 1, 2), "each")))


@oracle("_linalg_check_errors")
def check_errors(c: Call) -> None:
    """Raises if a valid matrix failed."""
    for info in c["info"].data[c["info"].mask]:
        c.op(info, c["api_name"], is_matrix=True)


@oracle("lu_unpack")
def lu_unpack(c: Call) -> Any:
    """The operator does not read the factors that it does not unpack."""
    read = [name for name in ("LU_data", "LU_pivots") if c[f"unpack_{name[3:]}"]]
    return of_slices(c, lambda number: read)


# ----------------------------------------------------------------------------------------- systems of linear equations

oracle("cholesky_solve _cholesky_solve_helper linalg_lu_solve")(of_slices)


def _is_vector(matrix: Expected, right: Expected) -> bool:
    return right.ndim == 1 or (right.ndim == matrix.ndim - 1 and right.shape == matrix.shape[:-1])


@oracle("_linalg_solve_ex")
def _linalg_solve_ex(c: Call) -> Any:
    """The solution by columns; factors, pivots and info by matrices."""
    return of_slices(c, lambda number: ("A",) if number else ("A", "B"))


@oracle("linalg_lstsq")
def linalg_lstsq(c: Call) -> Any:
    """Like a solve, with one residual for each column; rank and singular values by matrices."""
    stated = Equation("*MN,*M->*N,*1,*,*S" if _is_vector(c["self"], c["b"]) else "*MN,*Mk->*Nk,*k,*,*S")
    labels = stated.labels(c.op, c.bound)
    assert labels is not None
    return of_labels(c, labels, lambda number: ("self", "b")[: 2 - number // 2])


def _one_triangle(matrix: Expected, upper: bool, unitriangular: bool) -> Expected:
    """The matrix, marked valid wherever a triangular solve does not read it."""
    rows, columns = torch.meshgrid(*map(torch.arange, matrix.shape[-2:]), indexing="ij")
    read = rows < columns if upper else rows > columns
    if not unitriangular:
        read = read | (rows == columns)
    return Expected(matrix.data, matrix.mask | ~read)


@oracle("linalg_solve_triangular")
def linalg_solve_triangular(c: Call) -> Any:
    """The operator reads one triangle of the matrix."""
    matrix = _one_triangle(c["self"], c["upper"], c["unitriangular"])
    return of_slices(Call(c.op, c.bound | {"self": matrix}))


@oracle("triangular_solve")
def triangular_solve(c: Call) -> Any:
    """Like linalg_solve_triangular, with a copy of the whole matrix as second result."""
    matrix = _one_triangle(c["A"], c["upper"], c["unitriangular"])
    return of_slices(Call(c.op, c.bound | {"A": matrix}))[0], of_slices(c, lambda number: ("A",))[1]


# ----------------------------------------------------------------------------------------------------------- transforms


def of_blocks(c: Call, read: int | None = None, operand: str = "self", over: str = "dim") -> Expected:
    """The operator on each block over the dimensions that `over` names. The result keeps these dimensions.

    In the last of them, only the first `read` entries must be valid.
    """
    x, own = c[operand], batch_labels(c[operand].ndim)
    dims = [d % x.ndim for d in c[over]]
    if read is not None:
        counted = torch.arange(x.shape[dims[-1]]) < read
        x = Expected(x.data, x.mask | ~counted.reshape([-1] + [1] * (x.ndim - 1 - dims[-1])))
    labels = Labels({operand: own}, (own,), {own[d]: "each" for d in dims})
    result: Expected = of_labels(Call(c.op, c.bound | {operand: x}), labels)
    return result


@oracle("_fft_r2c", "_fft_c2c")
def fft(c: Call) -> Expected:
    """The transform of each block by itself."""
    return of_blocks(c)


@oracle("_fft_c2r")
def fft_c2r(c: Call) -> Expected:
    """The operator reads the constant and half of the other entries, which determine a real signal."""
    return of_blocks(c, c["last_dim_size"] // 2 + 1)


@oracle("istft")
def istft(c: Call) -> Expected:
    """Plain torch's result; a frame with a needed entry missing makes all samples that it covers invalid."""
    x, window, plain = c["self"], c["window"], c.plain()
    n_fft = c["n_fft"]
    hop, first = c["hop_length"] or n_fft // 4, n_fft // 2 if c["center"] else 0
    entries = x.mask if c["return_complex"] else x.mask[..., : n_fft // 2 + 1, :]
    mask = torch.ones(plain.shape, dtype=torch.bool)
    for frame in range(x.shape[-1]):
        start, stop = (max(frame * hop - first + offset, 0) for offset in (0, n_fft))
        mask[..., start:stop] &= entries[..., frame].all(-1, keepdim=True)
    if window is not None and not window.all_valid:
        mask &= False
    return Expected(plain, mask)


# ----------------------------------------------------------------------------------------------------------------------
# Recurrent networks: each row by itself, without its invalid steps; with invalid weights, by the textbook formulas.

# If every weight is valid, torch's own layer runs a row's valid steps, one layer and one direction at a time. Otherwise
# each gate is a sum over valid elements, and a unit keeps its state if one of its gates has no valid elements.

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
