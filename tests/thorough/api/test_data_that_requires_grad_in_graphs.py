"""In a compiled function masked_tensor of data that requires grad makes a leaf, as in eager, and breaks no graph."""

from __future__ import annotations

import torch
from torch import Tensor

import masked_dispatch as md


def test_a_compiled_function_is_one_graph_and_cuts_the_gradient() -> None:
    mask = torch.tensor([True, False, True])

    def function(w: Tensor) -> Tensor:
        return md.masked_tensor(w * 2, mask) * w

    w = torch.arange(3.0, requires_grad=True)
    torch.compile(function, backend="eager", fullgraph=True)(w).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [0, 0, 4]
