"""A tensor whose calls are traced, and the names of calls."""

from __future__ import annotations

from typing import Any

import torch

import masked_dispatch as md

MASK = torch.tensor([[True, True, False], [True, False, False]])


def some(requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(1.0, 7.0).reshape(2, 3), MASK, requires_grad=requires_grad)


def names(calls: Any) -> list[str]:
    return [call.name for call in calls]
