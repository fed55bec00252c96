"""Pieces that torch promises are no views of what they are taken from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from sixteen_elements import MASK, T, sample, state

PIECES: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "unsafe_split": lambda x: x.unsafe_split(2),
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, 3]),
    "unsafe_chunk of columns": lambda x: x.unsafe_chunk(2, 1),
    "_unsafe_view": lambda x: [torch.ops.aten._unsafe_view(x, (2, 8))],
}


@pytest.mark.parametrize("pieces, mask", zip(PIECES, cycle([MASK, MASK[:1], None]), strict=False))
def test_pieces_share_all_or_nothing(pieces: str, mask: Tensor | None) -> None:
    x = md.masked_tensor(torch.arange(16.0).reshape(4, 4), mask)
    before = state(x)
    for piece in PIECES[pieces](x):
        piece.fill_(50.0)
    assert state(x) == before
    found = PIECES[pieces](x)
    kept = [state(piece) for piece in found]
    x.fill_(60.0)
    assert [state(piece) for piece in found] == kept


@pytest.mark.parametrize("pieces", PIECES)
def test_gradients_pass_through_pieces(pieces: str) -> None:
    x = sample().requires_grad_()
    sum((piece * 2).sum() for piece in PIECES[pieces](x)).backward()
    assert torch.equal(x.grad.get_mask(), MASK)
    assert (x.grad == 2).to_tensor(T).all()
