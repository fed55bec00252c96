"""Each sample's rows move within what is stored: nothing of a packed batch is stored densely for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from equal_extents import same

MOVES: dict[str, Callable[[Any], Tensor]] = {
    "last": lambda x: md.last(x),
    "last two": lambda x: md.last(x, 1, 2),
    "more than there are": lambda x: md.last(x, 1, 9),
    "first": lambda x: md.first(x),
    "first two": lambda x: md.first(x, 1, 2),
    "flip": lambda x: x.flip(1),
    "flip of samples too": lambda x: x.flip((0, 1)),
    "flip of features": lambda x: x.flip(2),
    "flip, time first": lambda x: x.transpose(0, 1).flip(0),
    "flip of heads": lambda x: x.unflatten(2, (2, 1)).transpose(1, 2).flip(2),
    "roll": lambda x: x.roll((1, 1), (1, 0)),
    "roll by more than there are": lambda x: x.roll(-6, 1),
    "samples chosen": lambda x: x[torch.tensor([2, 0, 2])],
    "positions chosen": lambda x: x[:, torch.tensor([2, 0])],
    "gather": lambda x: x.gather(1, torch.tensor([2, 0]).view(1, 2, 1).expand(3, 2, 2)),
    "features joined": lambda x: torch.cat([x, 2 * x], -1),
    "features split": lambda x: x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("name", MOVES)
def test_packed_rows_move(name: str) -> None:
    data = torch.randn(3, 4, 2, dtype=torch.float64)
    padded = md.from_lengths(data, torch.tensor([4, 0, 3])).requires_grad_()
    packed = padded.detach().to_packed().requires_grad_()
    with md.densify("never"):
        found = MOVES[name](packed)
    expected = MOVES[name](padded)
    same(found.to_dense(), expected)
    assert found._extent.known == expected._extent.known
    assert found._extent.is_mask
    found.square().sum().backward()
    expected.square().sum().backward()
    same(packed.grad.to_dense(), padded.grad)


def test_parts_that_know_the_same_keep_their_rows_valid_without_a_mask() -> None:
    x = md.from_lengths(torch.randn(3, 4, 2), torch.tensor([4, 0, 3])).to_packed()
    for y in (torch.cat([x, 2 * x], -1), x.chunk(2, -1)[0], torch.stack([x, x.exp()], -1)):
        assert y.storage_layout is torch.jagged
        assert y._kept_validity is None
