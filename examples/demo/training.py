"""One training loop for every competitor: masked or filled, eager or compiled; stock AdamW throughout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from examples.demo.console import Bar

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Compilation:
    """What torch.compile counted: graphs, graph breaks, and recompiles caused by a changed input."""

    graphs: int
    breaks: int
    recompiles: int

    @classmethod
    def since_reset(cls) -> Compilation:
        """Counted since the last :func:`reset_compiler`."""
        recompiles = sum(metrics.recompile_reason is not None for metrics in get_compilation_metrics())
        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), recompiles)


def reset_compiler() -> None:
    """Forget every compiled function and every count."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()


@dataclass(frozen=True)
class Run:
    """The results of one training run.

    model         as it was when training ended
    losses        the loss of every step
    first_step    seconds, compilation included
    per_step      milliseconds, the median of the later steps
    compilation   None in eager mode
    """

    model: nn.Module
    losses: list[float]
    first_step: float
    per_step: float
    compilation: Compilation | None

    @property
    def last_loss(self) -> float:
        """The mean loss of the last ten steps."""
        return fmean(self.losses[-10:])


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def rows_of_batches(examples: int, size: int, epochs: int) -> Iterator[Tensor]:
    """Row numbers of whole batches, in the same random order for every competitor."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(examples, generator=generator)
        yield from order[: examples // size * size].split(size)


def train(make_model: Callable[[], nn.Module], batches: Sequence[Batch], bar: Bar, *, compiled: bool = False) -> Run:
    """Train a fresh model, one step for each batch."""
    torch.manual_seed(0)
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compute_loss = loss_of
    if compiled:
        reset_compiler()
        compute_loss = torch.compile(loss_of, fullgraph=True)

    losses, seconds = [], []
    for x, y in batches:
        start = time.perf_counter()
        loss = compute_loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        bar.advance()
    counted = Compilation.since_reset() if compiled else None
    return Run(model, losses, seconds[0], 1e3 * median(seconds[1:]), counted)


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return model(x)
