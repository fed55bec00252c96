"""Averages of integers under a mask are the integer part of sum / count, also where that is a large whole number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md


@pytest.mark.parametrize(
    "pool",
    [lambda x: F.avg_pool1d(x, 2), lambda x: F.adaptive_avg_pool1d(x, 2), lambda x: F.avg_pool2d(x[None], (1, 2))[0]],
)
@pytest.mark.parametrize("value", [3, 3_000_000, 2**24 + 2, 2**48 + 1])
def test_the_average_of_equal_integers_is_that_integer(pool: Callable[[Tensor], Tensor], value: int) -> None:
    x = md.masked_tensor(torch.full((1, 1, 4), value), torch.tensor([[[True, True, True, False]]]))
    assert pool(x).flatten().tolist() == [value, value]


def test_what_is_no_whole_number_is_truncated_as_in_torch() -> None:
    data = torch.tensor([[[2, 3, 2_000_000, 2_000_001]]])
    x = md.masked_tensor(data, torch.ones_like(data, dtype=torch.bool))
    assert torch.equal(F.avg_pool1d(x, 2).to_tensor(0), F.avg_pool1d(data, 2))
