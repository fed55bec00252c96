"""Forty functions of two masked matrices of 4 × 4, none of which has to know a value: the host need not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md

Function = Callable[[Any, Any], Any]
FUNCTIONS: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x.get_mask(), x, y),
    "exp": lambda x, y: x.exp(),
    "sum": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(1),
    "var": lambda x, y: x.var(0),
    "amax": lambda x, y: x.amax(0),
    "logsumexp": lambda x, y: x.logsumexp(0),
    "norm": lambda x, y: torch.linalg.vector_norm(x),
    "median": lambda x, y: x.median(0).values,
    "quantile": lambda x, y: x.quantile(0.5, 0),
    "cumsum": lambda x, y: x.cumsum(0),
    "cummax": lambda x, y: x.cummax(0).values,
    "sort": lambda x, y: x.sort().values,
    "topk": lambda x, y: x.topk(2).values,
    "softmax": lambda x, y: x.softmax(-1),
    "layer_norm": lambda x, y: nn.functional.layer_norm(x, (4,)),
    "matmul": lambda x, y: x @ y,
    "conv1d": lambda x, y: nn.functional.conv1d(x[None], y[:, :, None]),
    "max_pool1d": lambda x, y: nn.functional.max_pool1d(x[None], 2),
    "attention": lambda x, y: nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    "mse_loss": lambda x, y: nn.functional.mse_loss(x, y),
    "cross_entropy": lambda x, y: nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=x.device)),
    "cat": lambda x, y: torch.cat([x, y]),
    "gather": lambda x, y: x.gather(0, torch.zeros(1, 4, dtype=torch.int64, device=x.device)),
    "index_add": lambda x, y: x.index_add(0, torch.arange(4, device=x.device), y),
    "pad": lambda x, y: nn.functional.pad(x, (1, 1)),
    "dropout": lambda x, y: nn.functional.dropout(x, 0.5),
    "cdist": lambda x, y: torch.cdist(x, y),
    "inv": lambda x, y: torch.linalg.inv(x),
    "written": lambda x, y: x.clone().mul_(y),
    "assigned": lambda x, y: x.clone().index_copy_(0, torch.arange(4, device=x.device), y),
    "slice assigned": lambda x, y: x.clone()[1:].copy_(y[1:]),
    "to_tensor": lambda x, y: x.to_tensor(0),
    "mask_with": lambda x, y: x.mask_with(y.get_mask()),
    "masked_tensor": lambda x, y: md.masked_tensor(x.get_data().detach(), y.get_mask()),
    "as_masked_tensor": lambda x, y: md.as_masked_tensor(x.get_data(), y.get_mask()),
    "count": lambda x, y: x.count(0),
    "linear": lambda x, y: nn.functional.linear(x, y),
    "gelu": lambda x, y: nn.functional.gelu(x),
}


def operands(device: torch.device | str) -> tuple[Any, Any]:
    """Two leaves, under masks of their own."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(4, 4, generator=generator) > 0.3 for _ in range(2)]
    data = [torch.randn(4, 4, generator=generator) for _ in range(2)]
    x, y = (md.masked_tensor(d.to(device), m.to(device), requires_grad=True) for d, m in zip(data, masks, strict=True))
    return x, y


def forward_and_backward(function: Function, x: Any, y: Any) -> list[Tensor | None]:
    """The result of a function, and the gradients of its sum; random numbers are drawn anew."""
    torch.manual_seed(0)
    result = function(x, y)
    if not result.requires_grad:
        return [result]
    return [result, *torch.autograd.grad(result, (x, y), torch.ones_like(result), allow_unused=True)]
