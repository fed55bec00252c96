"""The gradient formula of average pooling, called by hand on a small image."""

from __future__ import annotations

import torch

from masked_dispatch import masked_tensor

aten = torch.ops.aten


def pooled_backward(grad, x):
    return aten.avg_pool2d_backward(grad, x.square(), [2, 2], [2, 2], [0, 0], False, True, None)


def small(requires_grad=False):
    torch.manual_seed(0)
    x = masked_tensor(torch.randn(1, 1, 4, 4), torch.rand(1, 1, 4, 4) < 0.6, requires_grad=requires_grad)
    grad = masked_tensor(
        torch.randn(1, 1, 2, 2), torch.tensor([[[[1, 1], [0, 1]]]]).bool(), requires_grad=requires_grad
    )
    return grad, x
