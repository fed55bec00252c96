"""Modules that store a padded batch sparsely inside, exported and compared: values and gradients of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import same


class StoredSparsely(nn.Module):
    """A padded batch that is stored sparsely inside of the module."""

    def __init__(self, stored: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.stored = nn.Linear(4, 3), stored

    def forward(self, data: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(self.stored(md.from_lengths(data, lengths)))
        return y.sum(1).to_tensor(0.0), y.to_tensor(7.0)


STORED = {
    "packed": lambda x: x.to_packed(),
    "COO": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(2),
    "CSR": lambda x: x.to_layout(torch.sparse_csr),
    "BSR": lambda x: x.to_sparse_bsr((1, 1), dense_dim=1),
    "sparse_threshold": lambda x: md.sparse_threshold(x, 0.0),
    "sparse_topk": lambda x: md.sparse_topk(x, 2),
    "from packed": lambda x: x.to_packed().to_sparse(2),
}


def check_export(name: str, strict: bool) -> None:
    """How much is stored is known when the program runs; its batch and its length may be others, too."""
    net = StoredSparsely(STORED[name])
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(
        net,
        (torch.randn(3, 5, 4), torch.tensor([2, 5, 1])),
        strict=strict,
        dynamic_shapes={"data": sizes, "lengths": {0: sizes[0]}},
    )
    plain = program.run_decompositions()
    assert not any("masked_dispatch" in str(node.target) for node in plain.graph.nodes)
    for form in (program, plain):
        for lengths in ([2, 5, 1], [0, 4, 6, 1]):
            data = torch.randn(len(lengths), max(lengths), 4)
            gradients = []
            for module in (net, form.module()):
                leaf = data.clone().requires_grad_()
                result = module(leaf, torch.tensor(lengths))
                gradients.append(torch.autograd.grad(sum(r.square().sum() for r in result), leaf)[0])
            same(form.module()(data, torch.tensor(lengths)), net(data, torch.tensor(lengths)))
            same(*gradients)
