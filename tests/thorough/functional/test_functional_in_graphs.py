"""Function transforms of masked tensors, stored densely and sparsely, in compiled code."""

from __future__ import annotations

import torch

from masked_dispatch import functional as F
from samples_for_transforms import STORED, dense, layouts, same, sample


def test_transforms_compile() -> None:
    compiled = torch.compile(F.vmap(F.grad_and_value(lambda r: (r**3).mean())), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = sample(seed)
        same(compiled(x), F.vmap(F.grad_and_value(lambda r: (r**3).mean()))(x))


@layouts
def test_transforms_of_sparse_storage_compile(storage: str) -> None:
    compiled = torch.compile(F.grad(lambda x: (x**3).sum()), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = STORED[storage](dense(seed))
        same(compiled(x), 3 * dense(seed) ** 2, x.storage_layout)
