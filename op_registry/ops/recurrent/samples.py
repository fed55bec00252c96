"""Conformance samples of recurrent networks and packed sequences, which torch's operator database lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from op_registry.authoring import Rule
from op_registry.ops.recurrent import packing, rules

Make = Callable[..., Tensor]
STEPS, BATCH, FEATURES, HIDDEN = 4, 3, 3, 2
PACKED = (3, 2, 1)


def weights(make: Make, module: nn.Module) -> list[Tensor]:
    """Parameters in torch's order."""
    return [make(p.shape, low=-1, high=1) for p in module.parameters()]


def state(make: Make, module: nn.Module, batch: Sequence[int], projections: int = 0) -> Any:
    """An initial state, in the form that the network takes."""
    h = make((*batch, projections or HIDDEN), low=-1, high=1)
    with_memory = isinstance(module, (nn.LSTM, nn.LSTMCell))
    return [h, make((*batch, HIDDEN), low=-1, high=1)] if with_memory else h


def layers(network: Callable[..., nn.Module], packed: bool, make: Make) -> Iterator[tuple[Any, ...]]:
    """Several numbers of layers and directions, with and without biases, dropout and projections."""
    for number, bidirectional, has_biases, dropout, projections in (
        (1, False, True, 0.0, 0),
        (2, True, True, 0.0, 0),
        (2, False, False, 0.5, 0),
        *([(2, True, True, 0.0, 1)] if network is nn.LSTM else []),
    ):
        projected = {"proj_size": projections} if projections else {}
        module = network(FEATURES, HIDDEN, number, bias=has_biases, bidirectional=bidirectional, **projected)
        hx = state(make, module, (number * (1 + bidirectional), BATCH), projections)
        options = (hx, weights(make, module), has_biases, number, dropout, True, bidirectional)
        if packed:
            yield (make((sum(PACKED), FEATURES)), torch.tensor(PACKED), *options)
        elif number == 1:
            yield (make((STEPS, BATCH, FEATURES)), *options, False)
        else:
            yield (make((BATCH, STEPS, FEATURES)), *options, True)


def cells(cell: Callable[..., nn.Module], make: Make) -> Iterator[tuple[Any, ...]]:
    """With and without biases."""
    for bias in (True, False):
        module = cell(FEATURES, HIDDEN, bias=bias)
        yield (make((BATCH, FEATURES)), state(make, module, (BATCH,)), *weights(make, module))


def register(
    network: Callable[..., nn.Module], cell: Callable[..., nn.Module], on_padded: Rule, on_packed: Rule, one_step: Rule
) -> None:
    """Register samples of one network for each of its rules."""
    on_padded.samples(functools.partial(layers, network, False))
    on_packed.samples(functools.partial(layers, network, True))
    one_step.samples(functools.partial(cells, cell))


register(nn.LSTM, nn.LSTMCell, rules.lstm, rules.lstm_data, rules.lstm_cell)
register(nn.GRU, nn.GRUCell, rules.gru, rules.gru_data, rules.gru_cell)
register(nn.RNN, nn.RNNCell, rules.rnn_tanh, rules.rnn_tanh_data, rules.rnn_tanh_cell)
register(nn.RNN, nn.RNNCell, rules.rnn_relu, rules.rnn_relu_data, rules.rnn_relu_cell)


@packing._pack_padded_sequence.samples
def pack(make: Make) -> Iterator[tuple[Any, ...]]:
    """With either batch_first."""
    for batch_first in (False, True):
        yield (make((3, 3, 2)), torch.tensor(PACKED), batch_first)


@packing._pad_packed_sequence.samples
def pad(make: Make) -> Iterator[tuple[Any, ...]]:
    """Padded to the longest sequence, and beyond it."""
    for batch_first, total in ((False, 0), (True, 5)):
        yield (make((sum(PACKED), 2)), torch.tensor(PACKED), batch_first, 0.5, total)


@packing.pad_sequence.samples
def pad_each(make: Make) -> Iterator[tuple[Any, ...]]:
    """With padding on either side."""
    for batch_first, side in ((False, "right"), (True, "left")):
        yield ([make((n, 2)) for n in PACKED], batch_first, 0.5, side)
