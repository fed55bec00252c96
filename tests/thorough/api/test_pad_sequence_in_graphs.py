"""pad_sequence in compiled code: rows with masks of their own, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import masked_dispatch as md
from rows_to_pad import by_hand, rows_of


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
