"""Recurrent networks and convolutions, and the samples that they are given: steps with gaps, ragged samples."""

from __future__ import annotations

import math

import torch
from torch import nn

from masked_dispatch import MaskedTensor, is_masked_tensor, masked_tensor

TIME, BATCH, FEATURES, HIDDEN = 6, 4, 3, 4
NETWORKS = {
    "lstm": (nn.LSTM, {}),
    "projected lstm": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
    "rnn_tanh": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def network(name: str, layers: int = 1, **options) -> nn.RNNBase:
    kind, own = NETWORKS[name]
    return kind(FEATURES, HIDDEN, layers, dtype=torch.float64, **own, **options)


def steps() -> tuple[torch.Tensor, torch.Tensor]:
    """Data (T, B, features), and which steps (T, B) there are: all of a row, none, and some with gaps."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(TIME, BATCH, FEATURES, generator=generator, dtype=torch.float64)
    mask = torch.rand(TIME, BATCH, generator=generator) < 0.5
    mask[:, 0], mask[:, 1] = True, False
    mask[:, 2] = torch.tensor([False, True, True, False, True, False])
    return data, mask


def hidden(data: torch.Tensor, mask: torch.Tensor, garbage: float = math.nan) -> MaskedTensor:
    """A masked tensor with garbage where it is invalid, and one validity for a step."""
    where = mask[..., None] if mask.ndim < data.ndim else mask
    return masked_tensor(torch.where(where, data, garbage), where, requires_grad=True)


def states(state: object) -> tuple:
    return state if isinstance(state, tuple) else (state,)


def shown(x):
    return x.to_tensor(0) if is_masked_tensor(x) else x


# Convolutions ---------------------------------------------------------------------------------------------------------

CHANNELS = 4


def ragged(sizes, starts, shape, seed=0, holes=0.0):
    """Samples of (CHANNELS, *size) with their masks, and the batch of `shape` in which each begins at its start."""
    generator = torch.Generator().manual_seed(seed)
    samples, data = [], torch.full((len(sizes), CHANNELS, *shape), torch.nan, dtype=torch.float64)
    mask = torch.zeros(data.shape, dtype=torch.bool)
    for number, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        sample = torch.randn(CHANNELS, *size, generator=generator, dtype=torch.float64)
        valid = torch.rand(sample.shape, generator=generator) >= holes
        valid[(0, *[0] * len(size))] = valid[(0, *[-1] * len(size))] = True  # so that the box is the sample
        box = (number, slice(None), *(slice(s, s + n) for s, n in zip(start, size, strict=True)))
        data[box], mask[box] = torch.where(valid, sample, torch.nan), valid
        samples.append(masked_tensor(torch.where(valid, sample, torch.nan), valid))
    return samples, masked_tensor(data, mask)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(CHANNELS, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 2, 3, padding=1)).double()
