"""Function transforms of masked tensors in compiled code."""

from __future__ import annotations

import torch

from masked_dispatch import functional as F
from samples_for_transforms import same, sample


def test_transforms_compile() -> None:
    compiled = torch.compile(F.vmap(F.grad_and_value(lambda r: (r**3).mean())), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = sample(seed)
        same(compiled(x), F.vmap(F.grad_and_value(lambda r: (r**3).mean()))(x))
