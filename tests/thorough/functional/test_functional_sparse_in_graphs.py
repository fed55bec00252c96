"""Function transforms of sparse storage in compiled code."""

from __future__ import annotations

import torch

from masked_dispatch import functional as F
from sparse_samples_for_transforms import STORED, dense, layouts, same


@layouts
def test_transforms_compile(storage: str) -> None:
    compiled = torch.compile(F.grad(lambda x: (x**3).sum()), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = STORED[storage](dense(seed))
        same(compiled(x), 3 * dense(seed) ** 2, x.storage_layout)
