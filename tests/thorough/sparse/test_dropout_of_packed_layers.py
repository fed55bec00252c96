"""Dropout in torch's own encoder layer, on packed batches: many draws."""

from __future__ import annotations

import torch
from torch import nn

import masked_dispatch as md
from packed_batches import D, H, batch


def test_dropout_in_torchs_own_encoder_layer():
    """Torch draws in memory order, which changes within the layer; packed batches have one order (operators.md)."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(D, H, 8, 0.4, batch_first=True).double()
    x = batch("padding", D).to_packed()
    with md.densify("never"):
        draws = [layer(x) for _ in range(400)]
    assert all(torch.equal(draw.get_mask(), x.get_mask()) for draw in draws)
    assert not torch.equal(draws[0].to_tensor(0), draws[1].to_tensor(0))
    assert torch.stack([draw.to_tensor(0) for draw in draws]).isfinite().all()
