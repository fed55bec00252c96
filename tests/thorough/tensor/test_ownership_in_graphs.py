"""Who owns a mask in compiled regions: writes to arguments, after they were read too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from ragged_masks import F, T, mask_of, ragged


def compiled(f):
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def test_a_compiled_region_writes_into_the_mask_of_its_input() -> None:
    @compiled
    def first_row_becomes_valid(x: Tensor) -> Tensor:
        x[0] = 1.0
        return x.sum()

    x = ragged()
    assert first_row_becomes_valid(x).item() == 13.0
    assert mask_of(x) == [[T, T, T], [T, F, T]]


def test_a_compiled_region_cannot_change_the_kind_of_validity() -> None:
    @compiled
    def invalidate(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y)
        return x.sum()

    x = md.masked_tensor(torch.zeros(2, 3))
    with pytest.raises(Exception, match="would change how the mask of a tensor of shape"):
        invalidate(x, ragged())


def test_a_compiled_region_may_write_after_it_has_read() -> None:
    @compiled
    def read_then_write(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        x[0] = 1.0
        return y, x * 1

    x = ragged()
    mask = mask_of(x)
    y, z = read_then_write(x)
    assert mask_of(y) == mask
    assert mask_of(x) == mask_of(z) == [[T, T, T], [T, F, T]]
