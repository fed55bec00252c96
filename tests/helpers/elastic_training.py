"""``torchrun … elastic_training.py FOLDER KIND STEP``: a checkpoint after each step, and rank 1 is killed once.

It is killed in the middle of step STEP (0: never). After a restart the training goes on from the last checkpoint. KIND
is "masked", or "plain" for a control without masked tensors.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

import masked_dispatch as md

STEPS = 6


class Layer(nn.Module):
    """A linear layer, with holes in its weight if it is masked."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        weight: Any = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
        self.weight = nn.Parameter(md.masked_tensor(weight, torch.arange(12).view(3, 4) % 5 > 0) if masked else weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def batch(masked: bool, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return md.masked_tensor(x, torch.rand(5, 4, generator=generator) < 0.7) if masked else x


def loss_of(output: Any, masked: bool) -> Tensor:
    return md.distributed.mean_loss(output.square()) if masked else output.square().mean()


def main(folder: Path, masked: bool, killed_in: int) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = Layer(masked)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    last, began = folder / "last", 0
    if last.exists():
        began = int(last.read_text())
        state = {"model": model.state_dict()}
        checkpoint.load(state, checkpoint_id=folder / f"step{began}")
        model.load_state_dict(state["model"])
    for step in range(began + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(parallel(batch(masked, step, rank)), masked)
        if rank == 1 and step == killed_in and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / f"step{step}")
        if rank == 0:
            last.write_text(str(step))
        distributed.barrier()
    if rank == 0:
        weight: Any = model.weight.detach()
        numbers = weight.to_tensor(0) if masked else weight
        (folder / "result").write_text(json.dumps({"weight": numbers.tolist(), "began": began}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "masked", int(sys.argv[3]))
