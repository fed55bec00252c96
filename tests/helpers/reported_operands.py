"""Operands of bugs that were reported."""

from __future__ import annotations

import torch

import masked_dispatch as md

NAN, INF = float("nan"), float("inf")


def masked(values: list, *, requires_grad: bool = False) -> md.MaskedTensor:
    """None marks an invalid element; what is stored there is NaN."""
    data = torch.tensor([[NAN if v is None else v for v in row] for row in values])
    mask = torch.tensor([[v is not None for v in row] for row in values])
    return md.masked_tensor(data, mask, requires_grad=requires_grad)


X = [[1.0, 2.0, None], [4.0, None, 6.0]]
