"""pad_sequence: padding that is invalid, rows that keep their masks, in eager and compiled code, with gradients."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence as torch_pad_sequence

import masked_dispatch as md
from rows_to_pad import F, T, by_hand, rows_of

SIDES: list[Literal["left", "right"]] = ["left", "right"]


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
