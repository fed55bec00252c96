"""The functions of torch.sparse, each with the function that it stands for, and a matrix for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import masked_dispatch as md
from storages import STORAGES

MASK = torch.tensor([[True, False, True, True], [False] * 4, [True, True, False, True]])
Call = Callable[[Tensor], Tensor]
W = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
B = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
SAME: dict[str, tuple[Call, Call]] = {
    "mm": (lambda x: torch.sparse.mm(x, W), lambda x: torch.mm(x, W)),
    "mm of two": (lambda x: torch.sparse.mm(x, x.t()), lambda x: torch.mm(x, x.t())),
    "mm by sums": (lambda x: torch.sparse.mm(x, W, "sum"), lambda x: torch.mm(x, W)),
    "addmm": (
        lambda x: torch.sparse.addmm(B, x, W, beta=0.5, alpha=2.0),
        lambda x: torch.addmm(B, x, W, beta=0.5, alpha=2.0),
    ),
    "sum": (lambda x: torch.sparse.sum(x), lambda x: x.sum()),
    "sum in a dtype": (lambda x: torch.sparse.sum(x, dtype=torch.float64), lambda x: x.sum(dtype=torch.float64)),
    "sum along 0": (lambda x: torch.sparse.sum(x, 0), lambda x: x.sum(0)),
    "sum along both": (lambda x: torch.sparse.sum(x, (0, 1)), lambda x: x.sum((0, 1))),
    "sum along 1 in a dtype": (
        lambda x: torch.sparse.sum(x, (1,), dtype=torch.float64),
        lambda x: x.sum(1, dtype=torch.float64),
    ),
    "softmax": (lambda x: torch.sparse.softmax(x, 1), lambda x: x.softmax(1)),
    "softmax in a dtype": (
        lambda x: torch.sparse.softmax(x, 0, dtype=torch.float64),
        lambda x: x.softmax(0, dtype=torch.float64),
    ),
    "log_softmax": (lambda x: torch.sparse.log_softmax(x, 1), lambda x: x.log_softmax(1)),
    "hspmm": (lambda x: torch.hspmm(x, W), lambda x: torch.mm(x, W)),
    "smm": (lambda x: torch.smm(x, W), lambda x: torch.mm(x, W)),
    "sspaddmm": (lambda x: torch.sspaddmm(B, x, W, beta=3), lambda x: torch.addmm(B, x, W, beta=3)),
}


def example(storage: str) -> md.MaskedTensor:
    data = torch.arange(1.0, 13.0).reshape(3, 4).sin()
    return STORAGES[storage](md.masked_tensor(torch.where(MASK, data, torch.nan), MASK)).detach().requires_grad_()
