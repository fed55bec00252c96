"""Attention masks and lengths become masked tensors, and come from them, inside of compiled regions."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.interop import from_attention_mask, to_lengths
from padded_data import DATA, ONES


def test_masks_are_made_inside_compiled_regions() -> None:
    def region(data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = from_attention_mask(data, mask)
        return x.sum(1).to_tensor(0), to_lengths(x)

    found = torch.compile(region, backend="aot_eager", fullgraph=True)(DATA, ONES)
    torch.compiler.reset()
    for mine, expected in zip(found, region(DATA, ONES), strict=True):
        assert torch.equal(mine, expected)
