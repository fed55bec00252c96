"""Losses over classes of distributed tensors: of rows and of classes that are divided unevenly, with derivatives.

Under torch's loss_parallel too, which computes the losses of classes that are divided; for plain tensors it takes no
weights where a row is ignored, and no smoothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import masked_dispatch as md
from process_groups import Check
from refused_collectives import raises

CHECKS: dict[str, Check] = {}
ROWS, CLASSES = 8, 6
WEIGHT = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
Loss = Callable[[Any, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda x, target, weight: F.cross_entropy(x, target),
    "cross_entropy with weights": lambda x, target, weight: F.cross_entropy(x, target, weight),
    "cross_entropy, smoothed": lambda x, target, weight: F.cross_entropy(x, target, label_smoothing=0.1),
    "cross_entropy, smoothed with weights": lambda x, target, weight: F.cross_entropy(
        x, target, weight, label_smoothing=0.1
    ),
    "cross_entropy of probabilities": lambda x, target, weight: F.cross_entropy(
        x, (weight / weight.sum()).expand(x.shape), label_smoothing=0.1
    ),
    "cross_entropy of rows": lambda x, target, weight: F.cross_entropy(x, target, weight, reduction="none").sum(),
    "cross_entropy, summed": lambda x, target, weight: F.cross_entropy(x, target, reduction="sum"),
    "nll_loss": lambda x, target, weight: F.nll_loss(x.log_softmax(1), target),
    "nll_loss with weights": lambda x, target, weight: F.nll_loss(x.log_softmax(1), target, weight),
    "maximum of rows": lambda x, target, weight: x.max(1).values.sum() + x.min(1).values.sum(),
    "position of the maximum": lambda x, target, weight: (x.max(1).values * x.argmax(1)).sum(),
}
WITHOUT_LOG_SOFTMAX = ("cross_entropy of probabilities", "maximum of rows", "position of the maximum")


def scores() -> tuple[Tensor, Tensor, Tensor]:
    """Data, mask and target: rank 0 has one valid row, one row of the last rank is ignored."""
    data = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(ROWS * CLASSES).view(ROWS, CLASSES) % 7 > 0
    mask[1 : ROWS // 2 + 1] = False
    target = torch.arange(ROWS) % CLASSES
    target[0], target[-1] = 2, -100
    return data, mask, target


def compared(loss: Loss, mesh: DeviceMesh, placement: Any) -> None:
    data, mask, target = scores()
    alone = data.clone().requires_grad_()
    expected: Any = loss(md.as_masked_tensor(alone, mask), target, WEIGHT)
    expected.backward()
    divided: Any = distribute_tensor(data.masked_fill(~mask, torch.nan), mesh, [placement]).requires_grad_()
    x = md.as_masked_tensor(divided, distribute_tensor(mask, mesh, [placement]))
    target, weight = (distribute_tensor(t, mesh, [Replicate()]) for t in (target, WEIGHT))
    found: Any = loss(x, target, weight)
    md.testing.assert_close(md.distributed.full_tensor(found), expected.detach(), check_stride=False)
    assert expected.count() == 1
    found.backward()
    torch.testing.assert_close(divided.grad.full_tensor(), alone.grad)


def of_classes(rank: int, ranks: int, loss: Loss) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for placement in (Shard(0), Shard(1), Replicate()):
        compared(loss, mesh, placement)


def in_parallel(rank: int, ranks: int, loss: Loss) -> None:
    """Where a rank has no class, as the last of four, torch's own would wait for it: all are told instead."""
    mesh, a_rank_has_none = init_device_mesh("cpu", (ranks,)), len(torch.arange(CLASSES).chunk(ranks)) < ranks
    with loss_parallel():
        if a_rank_has_none and loss not in map(LOSSES.get, WITHOUT_LOG_SOFTMAX):
            raises(ValueError, lambda: compared(loss, mesh, Shard(1)), "loss_parallel() requires exactly one mesh dim")
        else:
            compared(loss, mesh, Shard(1))


for name, loss in LOSSES.items():
    CHECKS[f"divided: {name}"] = lambda rank, ranks, loss=loss: of_classes(rank, ranks, loss)
    CHECKS[f"in loss_parallel: {name}"] = lambda rank, ranks, loss=loss: in_parallel(rank, ranks, loss)
