"""Operands of calls that are explained."""

from __future__ import annotations

import torch

import masked_dispatch as md


def x() -> md.MaskedTensor:
    data = torch.arange(12.0).reshape(3, 4)
    return md.masked_tensor(data, data % 2 == 0)


def stored(layout: str) -> md.MaskedTensor:
    if layout == "dense":
        return x()
    block = {"blocksize": (1, 2)} if layout.startswith("sparse_bs") else {}
    return x().to_layout(getattr(torch, layout), **block)
