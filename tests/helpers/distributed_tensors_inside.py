"""Masked tensors whose data and mask are distributed tensors (DTensor), in every placement, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import masked_dispatch as md
from process_groups import Check

CHECKS: dict[str, Check] = {}
DATA = torch.arange(24.0, dtype=torch.float64).view(4, 6) / 7
MASK = torch.arange(24).view(4, 6) % 5 > 0
PLACEMENTS: dict[str, Any] = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "Replicate": Replicate()}

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": torch.abs,
    "add": lambda x: x + x,
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0),
    "any": lambda x: (x > 1).any(1),
    "argmax": lambda x: x.argmax(1),
    "cat": lambda x: torch.cat([x, x]),
    "clamp": lambda x: x.clamp(0.5, 2),
    "compare": lambda x: x > 1,
    "cos": torch.cos,
    "cumsum": lambda x: x.cumsum(1),
    "div": lambda x: x / (x + 1),
    "exp": torch.exp,
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 6),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "matmul": lambda x: x @ x.t(),
    "mean": torch.mean,
    "mean of columns": lambda x: x.mean(0),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "mul": lambda x: 3 * x * x,
    "norm": torch.norm,
    "permute": lambda x: x.permute(1, 0),
    "pow": lambda x: x**3,
    "prod": lambda x: x.prod(1),
    "relu": F.relu,
    "reshape": lambda x: x.reshape(-1),
    "rows": lambda x: x[1:],
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(1),
    "sqrt": torch.sqrt,
    "std": torch.std,
    "sub": lambda x: x - x.mean(1, keepdim=True),
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(1),
    "tanh": torch.tanh,
    "transpose": lambda x: x.t(),
    "var": lambda x: x.var(1),
    "where": lambda x: torch.where(x > 1, x, 2 * x),
}


def distributed_masked(placement: Any, ranks: int, hidden: float, requires_grad: bool = False) -> tuple[Any, Any]:
    """The masked tensor, and its data."""
    mesh = init_device_mesh("cpu", (ranks,))
    data = distribute_tensor(torch.where(MASK, DATA, hidden), mesh, [placement]).requires_grad_(requires_grad)
    return md.as_masked_tensor(data, distribute_tensor(MASK, mesh, [placement])), data


def gathered(x: Any) -> Any:
    return md.as_masked_tensor(x.get_data().full_tensor(), x.get_mask().full_tensor())


def agrees(rank: int, ranks: int, name: str) -> None:
    function = FUNCTIONS[name]
    for placement in PLACEMENTS.values():
        for hidden in (torch.nan, torch.inf):
            x, _ = distributed_masked(placement, ranks, hidden)
            expected = function(md.as_masked_tensor(DATA, MASK))
            md.testing.assert_close(gathered(function(x)), expected)


for name in FUNCTIONS:
    CHECKS[f"DTensor inside: {name}"] = lambda rank, ranks, name=name: agrees(rank, ranks, name)


def gradients(rank: int, ranks: int) -> None:
    for placement in PLACEMENTS.values():
        x, data = distributed_masked(placement, ranks, torch.nan, requires_grad=True)
        (F.softmax(x, 1) * x).sum().to_tensor(0).backward()
        alone = DATA.clone().requires_grad_()
        (F.softmax(md.as_masked_tensor(alone, MASK), 1) * md.as_masked_tensor(alone, MASK)).sum().to_tensor(
            0
        ).backward()
        gradient: Tensor = data.grad.full_tensor()
        torch.testing.assert_close(gradient, alone.grad)


CHECKS["DTensor inside: gradients are zero where invalid"] = gradients
