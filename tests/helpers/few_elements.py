"""Masked tensors of a few elements that several files of tests use, and what can be seen of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md

NAN, INF = math.nan, math.inf
T, F = True, False


def shown(x: Any, invalid: Any = None) -> list[Any]:
    """The elements in order, with `invalid` in place of those that are."""
    values, mask = x.get_data().flatten().tolist(), x.get_mask().flatten().tolist()
    return [value if valid else invalid for value, valid in zip(values, mask, strict=True)]


def dashed(x: Any) -> list[Any]:
    return shown(x, "--")


def mask_of(x: Tensor) -> list[object]:
    assert isinstance(x, md.MaskedTensor)
    mask: list[object] = x.get_mask().tolist()
    return mask


# Vectors of four elements; a shape and a mask of many rows -----------------------------------------------------------

FIRST, SECOND = torch.tensor([T, T, F, F]), torch.tensor([T, F, T, F])
EITHER = FIRST | SECOND
BIG = (64, 512)
BIG_ROWS = (torch.arange(64) % 3 > 0)[:, None]


def vector(values: Any, mask: Tensor, garbage: float = NAN, **options: Any) -> md.MaskedTensor:
    data = torch.tensor(values, dtype=torch.float64)
    return md.masked_tensor(torch.where(mask, data, garbage), mask, **options)


# Three numbers; an adaptive softmax with its rows --------------------------------------------------------------------

KNOWN = torch.tensor([T, F, T])


def three(*values: float, requires_grad: bool = False) -> md.MaskedTensor:
    """Three numbers, of which the second is invalid, with NaN in its place."""
    return md.masked_tensor(torch.where(KNOWN, torch.tensor(values), NAN), KNOWN, requires_grad=requires_grad)


def rows_and_classes() -> tuple[nn.Module, Tensor, Tensor]:
    """An adaptive softmax with rows and classes for it."""
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])
    return layer, torch.randn(4, 16), torch.tensor([1, 6, 12, 3])


def without_second_row(x: Tensor) -> md.MaskedTensor:
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[1] = False
    return md.masked_tensor(torch.where(mask, x, NAN), mask)


# Tables ---------------------------------------------------------------------------------------------------------------

X: list[list[float | None]] = [[1.0, 2.0, None], [4.0, None, 6.0]]


def table(values: list[list[Any]], *, requires_grad: bool = False) -> md.MaskedTensor:
    """None marks an invalid element; what is stored there is NaN."""
    data = torch.tensor([[NAN if v is None else v for v in row] for row in values])
    mask = torch.tensor([[v is not None for v in row] for row in values])
    return md.masked_tensor(data, mask, requires_grad=requires_grad)


def ragged(requires_grad: bool = False) -> md.MaskedTensor:
    return table(X, requires_grad=requires_grad)


def even_numbers() -> md.MaskedTensor:
    """0 … 11 as 3 × 4, of which the even ones are valid."""
    data = torch.arange(12.0).reshape(3, 4)
    return md.masked_tensor(data, data % 2 == 0)


def stored(layout: str) -> md.MaskedTensor:
    """The even numbers, in the layout of that name."""
    if layout == "dense":
        return even_numbers()
    block = {"blocksize": (1, 2)} if layout.startswith("sparse_bs") else {}
    return even_numbers().to_layout(getattr(torch, layout), **block)


# Rows that have from four valid elements to none
ROWS = torch.tensor([[T, T, T, T], [T, F, T, T], [F, F, T, T], [F, F, F, T], [F, F, F, F]])


def data_of_rows(garbage: float = NAN) -> Tensor:
    values = torch.rand(ROWS.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    return torch.where(ROWS, values, garbage)


def masked_rows(garbage: float = NAN, requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(data_of_rows(garbage), ROWS, requires_grad=requires_grad)


def results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def random_numbers(shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# Rows of several lengths, and their padding by hand -----------------------------------------------------------------


def padded_by_hand(rows: Sequence[Tensor], batch_first: bool, side: str) -> tuple[Tensor, Tensor]:
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
