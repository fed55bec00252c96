"""Samples of several sizes with their padded batch, and convolutions for them."""

from __future__ import annotations

import torch
from torch import nn

import masked_dispatch as md

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
        samples.append(md.masked_tensor(torch.where(valid, sample, torch.nan), valid))
    return samples, md.masked_tensor(data, mask)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(CHANNELS, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 2, 3, padding=1)).double()
