"""Training steps on one rank of several: the lines that are not in a program for one process are marked ``(ranks)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, checkpoint
from torch.nn.parallel import DistributedDataParallel

import masked_dispatch as md

BATCH = 126  # no multiple of 4: ranks have different numbers of rows, and of valid pixels anyway


class Restorer(nn.Module):
    """[rows, 64] pixels → [rows, 64]. Each of its `code` numbers looks at half of the pixels: the weight is masked."""

    def __init__(self, pixels: int = 64, code: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        seen = torch.rand(code, pixels, generator=generator) < 0.5
        weight = torch.randn(code, pixels, generator=generator, dtype=torch.float64) / 8
        self.weight = nn.Parameter(md.masked_tensor(weight, seen))
        self.bias = nn.Parameter(torch.zeros(code, dtype=torch.float64))
        self.restore = nn.Linear(code, pixels, dtype=torch.float64)
        nn.init.normal_(self.restore.weight, std=0.1, generator=generator)
        nn.init.zeros_(self.restore.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.restore(torch.tanh(F.linear(x, self.weight, self.bias)))


def standardised(pixels: Any, rank: int, ranks: int, group: ProcessGroup | None) -> Any:
    """All rows, by the mean and variance of each pixel, of which every rank computes its part."""
    mine = pixels[rank::ranks]
    mean = md.distributed.mean(mine, 0, keepdim=True, group=group)  # (ranks)
    variance = md.distributed.var(mine, 0, keepdim=True, group=group)  # (ranks)
    return (pixels - mean) / (variance.sqrt() + 0.1)


@dataclass
class Batch:
    """Rows with more pixels hidden, and the rows: masked, [rows, 64]."""

    seen: Any
    rows: Any

    def of_rank(self, rank: int, ranks: int) -> Batch:
        return Batch(self.seen[rank::ranks], self.rows[rank::ranks])


def batch_of(pixels: Any, step: int) -> Batch:
    """The rows of a step, a quarter of the pixels hidden: the same on all ranks."""
    rows = pixels[(torch.arange(BATCH) + step * BATCH) % len(pixels)]
    hidden = torch.rand(rows.shape, generator=torch.Generator().manual_seed(step)) < 0.25
    return Batch(rows.mask_with(~hidden), rows)


class Training:
    """A model, its optimizer and its losses, on one rank.

    pixels  [rows, 64], NaN where missing
    share   the share of the gradients that is sent (`topk_hook`); None: all, by DistributedDataParallel itself
    """

    def __init__(self, pixels: Tensor, group: ProcessGroup | None = None, share: float | None = None) -> None:
        self.group = group
        self.rank, self.ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self.pixels = standardised(md.from_nan(pixels), self.rank, self.ranks, group)
        self.model = Restorer()
        self.parallel = DistributedDataParallel(self.model, process_group=group)  # (ranks)
        self.top = None if share is None else md.distributed.TopK(share, group)
        if self.top is not None:
            self.parallel.register_comm_hook(self.top, md.distributed.topk_hook)  # (ranks)
        self.optimizer = torch.optim.SGD(self.parallel.parameters(), lr=0.5, momentum=0.9)
        self.losses: list[float] = []
        self.valid = 0

    def until(self, step: int) -> None:
        """Train until that many steps have been taken."""
        while len(self.losses) < step:
            batch = batch_of(self.pixels, len(self.losses)).of_rank(self.rank, self.ranks)  # (ranks)
            self.optimizer.zero_grad()
            errors = F.mse_loss(self.parallel(batch.seen), batch.rows, reduction="none")
            loss = md.distributed.mean_loss(errors, group=self.group)  # (ranks)
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            self.valid += int(errors.count())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}

    def save(self, folder: str) -> None:
        checkpoint.save(self.state(), checkpoint_id=folder, process_group=self.group)

    def load(self, folder: str) -> None:
        """Go on from a checkpoint, which any number of ranks may have saved."""
        self.until(1)  # an optimizer has a state from its first step on
        state = self.state()
        checkpoint.load(state, checkpoint_id=folder, process_group=self.group)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]

    def weights(self) -> list[Tensor]:
        """All parameters as plain tensors, 0 where they are invalid."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        return [x.to_tensor(0) if isinstance(x, md.MaskedTensor) else x for x in found]
