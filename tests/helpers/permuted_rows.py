"""A sparsely stored matrix whose dimensions are seen in another order."""

from __future__ import annotations

import torch

import masked_dispatch as md

NAN = float("nan")


def permuted() -> md.MaskedTensor:
    """(4, 3): the transpose of rows, one of which is absent and one partly valid."""
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, True]])
    data = torch.where(mask, torch.arange(1.0, 13.0).reshape(3, 4), NAN)
    return md.masked_tensor(data, mask).to_sparse(1).t()
