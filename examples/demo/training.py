"""One training loop for every competitor: masked or filled, eager or compiled; stock AdamW throughout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Run:
    """What one training run did.

    losses            the loss of every step
    first_step        seconds, compilation included
    per_step          milliseconds, the median of the later steps
    graphs, breaks    of torch.compile; None in eager
    recompiles        compilations after the first
    """

    name: str
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    first_step: float = 0.0
    per_step: float = 0.0
    graphs: int | None = None
    breaks: int | None = None
    recompiles: int | None = None

    @property
    def last_loss(self) -> float:
        """The mean loss of the last ten steps."""
        tail = self.losses[-10:]
        return sum(tail) / len(tail)


def batches(examples: int, size: int, epochs: int) -> Iterator[Tensor]:
    """Row numbers of whole batches, in the same random order for every competitor."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(examples, generator=generator)
        yield from order[: examples // size * size].split(size)


def train(
    name: str,
    make_model: Callable[[], nn.Module],
    objective: Objective,
    inputs: Tensor,
    targets: Tensor,
    *,
    compiled: bool = False,
    steps: list[Tensor],
    rate: float = 3e-3,
    each_step: Callable[[], None] = lambda: None,
) -> Run:
    """Train a fresh model on the rows that each of `steps` names; `objective(model, x, y)` is the loss."""
    torch.manual_seed(0)
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    run = Run(name, model)
    loss_of = objective
    if compiled:
        torch.compiler.reset()
        counters.clear()
        loss_of = torch.compile(objective, fullgraph=True)

    seconds = []
    losses = []
    for rows in steps:
        start = time.perf_counter()
        loss = loss_of(model, inputs[rows], targets[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.detach())
        each_step()

    run.losses = [float(loss) for loss in losses]
    run.first_step = seconds[0]
    run.per_step = 1e3 * sorted(seconds[1:])[len(seconds[1:]) // 2]
    if compiled:
        run.graphs = counters["stats"]["unique_graphs"]
        run.breaks = sum(counters["graph_break"].values())
        run.recompiles = counters["frames"]["ok"] - 1
    return run
