"""An operator of a user's own, with a fake and a derivative, and without a rule."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("conformance_tests::gelu_fast", mutates_args=())
def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


@gelu_fast.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(1.702 * x)
    return grad * (s + 1.702 * x * s * (1 - s))


gelu_fast.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
OWN = torch.ops.conformance_tests.gelu_fast
