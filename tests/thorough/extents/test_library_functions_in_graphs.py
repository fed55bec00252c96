"""Library functions that ask what is there, of what a graph computes: inside, an extent is known to operators alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from equal_extents import same
from masked_dispatch import missing

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ffill": lambda x: missing.ffill(x * 2, 1),
    "interpolate": lambda x: missing.interpolate(x * 2, 1),
    "shift": lambda x: missing.shift(x * 2, 1, 1),
    "fillna": lambda x: missing.fillna(x * 2, 9.0),
    "rolling": lambda x: missing.rolling(x * 2, 2, 1, min_count=1).mean(),
    "groups of samples": lambda x: missing.groupby(x * 2, [0, 1], 0, num_groups=2).sum(),
    "skipna": lambda x: md.mean(x * 2, 1, skipna=False),
    "a scan": lambda x: md.cumsum(x * 2, 1, skipna=False),
    "min_count": lambda x: md.sum(x * 2, 1, min_count=0),
}


@pytest.mark.parametrize("side", ["behind", "in front", "between"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_gives_the_same(name: str, side: str) -> None:
    places = {"behind": [1, 1, 0, 0], "in front": [0, 0, 1, 1], "between": [1, 0, 1, 1]}[side]
    there = torch.tensor([[1, 1, 1, 1], places]).bool()
    data = torch.arange(8.0).view(2, 4)
    x = md.padded(md.masked_tensor(data, there & (data != 2)), there, dim=1)
    same(torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")(x), FUNCTIONS[name](x))
