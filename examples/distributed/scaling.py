"""``python -m examples.distributed.scaling``: what a training step costs a rank, from 8 ranks to 1,024, counted.

torch's fake process group makes this one process rank 0 of any number. Its collectives send nothing and return at
once, so the numbers are wrong and their sizes are right: bytes in collectives, and the memory of all tensors. A masked
encoder is counted beside the same one with plain tensors, sharded by `fully_shard` or tensor parallel.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import masked_dispatch as md

ROWS, TIMES, WIDTH, HEADS, BLOCKS = 4, 16, 256, 1024, 2
RANKS = (8, 64, 256, 1024)
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Block(nn.Module):
    """[rows, times, 256] → the same: attention with 1,024 heads of two features, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value = (nn.Linear(WIDTH, 2 * HEADS) for _ in range(3))
        self.out = nn.Linear(2 * HEADS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        heads = [layer(y).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = encoder()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    wide, narrow = ("query", "key", "value", "up"), ("out", "down")
    plan = {**dict.fromkeys(wide, ColwiseParallel()), **dict.fromkeys(narrow, RowwiseParallel())}
    model = encoder()
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


STYLES: dict[str, Callable[[DeviceMesh], nn.Module]] = {"fully_shard": sharded, "tensor parallel": tensor_parallel}


class Cost(NamedTuple):
    """Of one step, on one rank."""

    calls: int
    bytes: int
    peak: int

    def __sub__(self, other: Any) -> Cost:
        return Cost(*(a - b for a, b in zip(self, other, strict=True)))


class Ledger(TorchDispatchMode):
    """Counts collectives and their bytes, and the bytes of all tensors that are there at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = self.peak = 0
        self.storages: dict[int, weakref.ref[Any]] = {}
        for parameter in model.parameters():
            self.note(parameter.to_local() if isinstance(parameter, DTensor) else parameter)

    def cost(self) -> Cost:
        return Cost(self.calls.total(), self.bytes, self.peak)

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # calls this again, for the parts of this rank
        result = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES and "wait" not in func.__name__ and "wrap" not in func.__name__:
            self.calls[func.__name__.partition(".")[0]] += 1
            self.bytes += max(sum(t.nbytes for t in plain_tensors(value)) for value in (*args, result))
        for tensor in plain_tensors(result):
            self.note(tensor)
        self.storages = {key: there for key, there in self.storages.items() if there() is not None}
        sizes = [storage.nbytes() for there in self.storages.values() if (storage := there()) is not None]
        self.peak = max(self.peak, sum(sizes))
        return result


def plain_tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in (Tensor, nn.Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from plain_tensors(part)


def step(model: nn.Module, style: str, masked: bool) -> None:
    """Forward, loss, backward and an update."""
    x: Any = torch.randn(ROWS, TIMES, WIDTH)
    if masked:
        x = md.from_lengths(x, torch.tensor([TIMES, TIMES // 2, 3, 1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = model(x).square()
    of_all_ranks = masked and style == "fully_shard"  # under tensor parallelism, every rank has the whole batch
    loss = md.distributed.mean_loss(losses) if of_all_ranks else losses.mean()
    loss.backward()
    optimizer.step()


def cost(style: str, ranks: int, masked: bool) -> Cost:
    """Of a step on rank 0 of so many, the second one: the first one makes what later ones share."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = STYLES[style](init_device_mesh("cpu", (ranks,)))
        step(model, style, masked)
        for parameter in model.parameters():
            parameter.grad = None
        with Ledger(model) as ledger:
            step(model, style, masked)
        return ledger.cost()
    finally:
        distributed.destroy_process_group()


def size(number: int) -> str:
    """Bytes, as a person reads them."""
    return f"{number} B" if number < 10**4 else f"{number / 2**20:.2f} MiB"


def table(costs: dict[tuple[str, int], tuple[Cost, Cost]]) -> list[str]:
    """Rows of Markdown: what the plain encoder costs, and what masks add."""
    rows = ["| | ranks | collectives | bytes in them | tensors at a time |", "|---|---|---|---|---|"]
    for (style, ranks), (plain, masked) in costs.items():
        more = masked - plain
        sizes = [f"{size(a)} + {size(b)}" for a, b in ((plain.bytes, more.bytes), (plain.peak, more.peak))]
        rows.append(f"| {style} | {ranks:,} | {plain.calls} + {more.calls} | {' | '.join(sizes)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.distributed.scaling", description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=RANKS, help="numbers of ranks (default: 8 64 256 1024)")
    parser.add_argument("--json", action="store_true", help="the costs as one JSON document")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = {
        (style, ranks): (cost(style, ranks, False), cost(style, ranks, True))
        for style in STYLES
        for ranks in arguments.ranks
    }
    if arguments.json:
        both = {key: {"plain": plain._asdict(), "masked": masked._asdict()} for key, (plain, masked) in costs.items()}
        print(json.dumps([{"style": style, "ranks": ranks, **of_both} for (style, ranks), of_both in both.items()]))
    else:
        print("\n".join(table(costs)))


if __name__ == "__main__":
    main()
