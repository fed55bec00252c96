"""A tensor whose calls are traced, the names of calls, and the page of a trace, written as a user writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import masked_dispatch as md

MASK = torch.tensor([[True, True, False], [True, False, False]])


def some(requires_grad: bool = False) -> md.MaskedTensor:
    return md.masked_tensor(torch.arange(1.0, 7.0).reshape(2, 3), MASK, requires_grad=requires_grad)


def names(calls: Any) -> list[str]:
    return [call.name for call in calls]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * x


def written_in(folder: Path) -> Path:
    """The page of a trace of a model and its backward, with what is stored densely and what is refused."""
    x = some(requires_grad=True)
    with md.trace() as t:
        Model()(x).mean().backward()
        torch.linalg.qr(x.detach().to_sparse())
        with pytest.raises(md.MaskedSemanticsError):
            torch.linalg.ldl_factor(x.detach())
    path = folder / "trace.html"
    t.to_html(path)
    return path
