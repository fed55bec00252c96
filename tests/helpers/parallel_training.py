"""Loss curves of a masked model in several processes, against one process: data parallel, sharded, tensor parallel.

No rank has as many valid elements as another, and in some steps one has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import masked_dispatch as md
from process_groups import Check

# Of 50 steps each; and a few of them in the tests that always run.
CHECKS: dict[str, Check] = {}
FEW: dict[str, Check] = {}
STEPS, A_FEW = 50, 7
ROWS, TIMES, WIDTH = 7, 4, 8


class Mixer(nn.Module):
    """[rows, times, 8] → [rows, times, 8]: linear layers, a normalisation, a residual, in double precision."""

    def __init__(self, holes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.double()
        if holes:
            for layer in (self.up, self.down):
                seen = torch.rand(layer.weight.shape) < 0.7
                weight: Any = md.masked_tensor(layer.weight.detach().masked_fill(~seen, torch.nan), seen)
                layer.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        return self.leave(y + self.down(torch.tanh(self.up(self.norm(y)))))


class Attention(nn.Module):
    """Four heads of two features; under tensor parallelism, a rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """Embedded indices, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids))


def batch(step: int) -> tuple[Any, Tensor]:
    """Masked input and plain target; in every third step only row 0 has something valid."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, TIMES, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape, generator=generator) < 0.6
    mask[0, 0, 0] = True
    mask[torch.arange(ROWS) > (0 if step % 3 == 2 else 4)] = False
    target = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return md.masked_tensor(x.masked_fill(~mask, torch.nan), mask), target


def indices(step: int) -> tuple[Any, Tensor]:
    """Masked indices, in no table where they are invalid, and a target."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 12, (ROWS, TIMES), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.6
    return md.masked_tensor(ids.masked_fill(~mask, 999), mask), batch(step)[1]


Loss = Callable[[nn.Module, int], Tensor]


def curve(model: nn.Module, loss_of: Loss, steps: int = STEPS, clip: float | None = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(loss.item())
    return found


def whole(model: nn.Module, step: int) -> Tensor:
    x, target = batch(step)
    return F.mse_loss(model(x), target)


def of_indices(model: nn.Module, step: int) -> Tensor:
    x, target = indices(step)
    return F.mse_loss(model(x), target)


def share(rank: int, ranks: int) -> Loss:
    """The loss of a rank's rows: in steps in which only row 0 has something, the other ranks have nothing."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, target = (t[rank::ranks] for t in batch(step))
        return md.distributed.mean_loss(F.mse_loss(model(x), target, reduction="none"))

    return loss_of


def equal(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0
    )


def data_parallel(rank: int, ranks: int, steps: int) -> None:
    expected = curve(Mixer(holes=True), whole, steps)
    assert expected[-1] < 0.95 * expected[0]
    equal(curve(DistributedDataParallel(Mixer(holes=True)), share(rank, ranks), steps), expected)


def fully_sharded(rank: int, ranks: int, steps: int) -> None:
    model = Mixer()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    equal(curve(model, share(rank, ranks), steps, clip=0.1), curve(Mixer(), whole, steps, clip=0.1))


def sharded_in_parts(rank: int, ranks: int, steps: int) -> None:
    """Two batches to a step, activations computed again in backward, parameters kept after forward."""

    def both(loss_of: Loss) -> Loss:
        return lambda model, step: md.accumulate(*(loss_of(model, 2 * step + part) for part in range(2)))

    def recomputed(loss_of: Loss) -> Loss:
        return lambda model, step: loss_of(lambda x: checkpoint(model, x, use_reentrant=False), step)  # type: ignore[arg-type]

    model = fully_shard(Mixer(), mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=False)
    found = curve(model, recomputed(both(share(rank, ranks))), steps)
    equal(found, curve(Mixer(), both(whole), steps))


def megatron() -> dict[str, ParallelStyle]:
    """Between `enter` and `leave`, each rank has some of the times."""
    return {
        "enter": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "leave": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def prepared() -> dict[str, ParallelStyle]:
    """Distributed tensors from the second layer to the last, and local ones around them."""
    return {
        "enter": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "norm": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "leave": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def tensor_parallel(
    model: Callable[[], nn.Module], plan: Callable[[], dict[str, Any]], loss_of: Loss = whole
) -> Curves:
    def compare(rank: int, ranks: int, steps: int) -> None:
        parallel = parallelize_module(model(), init_device_mesh("cpu", (ranks,)), plan())
        equal(curve(parallel, loss_of, steps), curve(model(), loss_of, steps))

    return compare


Curves = Callable[[int, int, int], None]
CURVES: dict[str, Curves] = {
    "DistributedDataParallel, masked weights": data_parallel,
    "fully_shard": fully_sharded,
    "fully_shard, accumulated and recomputed": sharded_in_parts,
    "tensor and sequence parallel": tensor_parallel(Mixer, megatron),
    "tensor parallel, masked weights": tensor_parallel(
        lambda: Mixer(holes=True), lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ),
    "tensor parallel, prepared modules": tensor_parallel(Mixer, prepared),
    "tensor parallel attention": tensor_parallel(
        Attention, lambda: {**dict.fromkeys(("query", "key", "value"), ColwiseParallel()), "out": RowwiseParallel()}
    ),
    "tensor parallel embedding, by columns": tensor_parallel(
        Tokens,
        lambda: {"words": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())},
        of_indices,
    ),
    "tensor parallel embedding, by rows": tensor_parallel(
        Tokens, lambda: {"words": RowwiseParallel(input_layouts=Replicate())}, of_indices
    ),
}
CHECKS.update({f"curve: {name}": functools.partial(curves, steps=STEPS) for name, curves in CURVES.items()})
FEW.update(
    {
        f"a few steps: {name}": functools.partial(CURVES[name], steps=A_FEW)
        for name in ("fully_shard", "tensor and sequence parallel")
    }
)
