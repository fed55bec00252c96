"""pad_sequence: padding that is invalid, rows that keep their masks, in eager and compiled code, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence as torch_pad_sequence

import masked_dispatch as md

T, F = True, False
SIDES: list[Literal["left", "right"]] = ["left", "right"]


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


@pytest.mark.parametrize("kind", ["plain", "masked", "mixed"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_padding_is_invalid_and_rows_keep_their_masks(
    kind: str, batch_first: bool, side: Literal["left", "right"]
) -> None:
    rows = rows_of(kind)
    x = md.pad_sequence(rows, batch_first, padding_side=side)
    data, mask = by_hand(rows, batch_first, side)
    assert torch.equal(x.get_mask(), mask)
    assert torch.equal(x.to_tensor(0), data)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged], ids=str)
def test_rows_in_any_storage(layout: torch.layout) -> None:
    rows = rows_of("masked")[:3]
    x = md.pad_sequence([row.to_layout(layout) for row in rows], batch_first=True)
    data, mask = by_hand(rows, True, "right")
    assert torch.equal(x.get_mask(), mask)
    assert torch.equal(x.to_tensor(0), data)


def test_what_lies_under_the_rows_masks_changes_nothing() -> None:
    row = torch.tensor([1.0, float("nan"), 3.0])
    x = md.pad_sequence([md.masked_tensor(row, torch.tensor([T, F, T])), torch.ones(2)], batch_first=True)
    assert float(x.sum()) == 6
    assert int(x.count()) == 4


@pytest.mark.parametrize("kind", ["plain", "masked", "mixed"])
@pytest.mark.parametrize("side", SIDES)
def test_gradients_reach_the_rows(kind: str, side: Literal["left", "right"]) -> None:
    rows = [row.requires_grad_() for row in rows_of(kind)]
    (md.pad_sequence(rows, padding_side=side) ** 2).sum().backward()
    for row in rows:
        grad = row.grad
        assert grad is not None
        assert type(grad) is type(row)
        if isinstance(grad, md.MaskedTensor):
            assert torch.equal(grad.get_mask(), row.get_mask())
            grad, row = grad.to_tensor(0), row.detach().to_tensor(0)
        assert torch.equal(grad, 2 * row.detach())


@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_compiled(kind: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def padded(*rows: Tensor) -> Tensor:
        return md.pad_sequence(rows, batch_first=True, padding_side="left") * 2

    rows = [row.requires_grad_() for row in rows_of(kind)[:3]]
    x = padded(*rows)
    data, mask = by_hand(rows, True, "left")
    assert isinstance(x, md.MaskedTensor)
    assert torch.equal(x.get_mask(), mask)
    assert torch.equal(x.detach().to_tensor(0), 2 * data)
    x.sum().backward()
    assert all(
        row.grad is not None and float(row.grad.sum()) == 2 * float(row.detach().mul(0).add(1).sum()) for row in rows
    )


def test_torch_pads_with_valid_numbers() -> None:
    rows = [md.masked_tensor(torch.ones(2), torch.tensor([T, F])), torch.ones(1)]
    x = torch_pad_sequence(rows, batch_first=True)
    assert isinstance(x, md.MaskedTensor)
    assert x.get_mask().tolist() == [[T, F], [T, T]]
    assert x.to_tensor(-1).tolist() == [[1, -1], [1, 0]]


def test_errors_are_torchs() -> None:
    with pytest.raises(RuntimeError, match="empty list of sequences"):
        md.pad_sequence([])
    with pytest.raises(RuntimeError, match="padding_side"):
        md.pad_sequence([torch.ones(2)], padding_side="top")  # type: ignore[arg-type]
