"""Rows of several lengths, plain and masked, and their padding by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import masked_dispatch as md

T, F = True, False


def by_hand(rows: Sequence[Tensor], batch_first: bool, side: str) -> tuple[Tensor, Tensor]:
    """Data (0 where invalid) and mask, written row by row."""
    steps = max(row.shape[0] for row in rows)
    data = torch.zeros(len(rows), steps, *rows[0].shape[1:])
    mask = torch.zeros(len(rows), steps, *rows[0].shape[1:], dtype=torch.bool)
    for n, row in enumerate(rows):
        place = slice(0, row.shape[0]) if side == "right" else slice(steps - row.shape[0], steps)
        masked = isinstance(row, md.MaskedTensor)
        data[n, place] = row.detach().to_tensor(0) if masked else row.detach()
        mask[n, place] = row.get_mask() if masked else True
    return (data, mask) if batch_first else (data.transpose(0, 1), mask.transpose(0, 1))


def rows_of(kind: str) -> list[Tensor]:
    plain = [torch.arange(1.0, 7.0).view(3, 2), torch.ones(1, 2), torch.full((2, 2), 5.0), torch.empty(0, 2)]
    if kind == "plain":
        return plain
    mask = torch.tensor([[T, F], [F, F], [T, T]])
    masked = [md.masked_tensor(row, mask[: row.shape[0]]) for row in plain]
    return [masked[0], plain[1], masked[2], plain[3]] if kind == "mixed" else masked
