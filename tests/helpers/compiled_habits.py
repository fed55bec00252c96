"""Ways to compile a training step or to export a model, with plain tensors and masked ones: graphs, graph breaks and
recompilations, and the same results as without compiling. Run as a program, this prints docs/results/compiled.md.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import same
from repository import ROOT

Batch = Callable[[int, int], Tensor]


def holes(rows: int, length: int) -> md.MaskedTensor:
    return md.masked_tensor(torch.randn(rows, length, 4), torch.rand(rows, length, 4) > 0.3)


def padded(rows: int, length: int) -> md.MaskedTensor:
    return md.from_lengths(torch.randn(rows, length, 4), torch.arange(length, length - rows, -1))


STORAGES: dict[str, Batch] = {
    "plain": lambda *sizes: torch.randn(*sizes, 4),
    "holes": holes,
    "padded": padded,
    "packed": lambda *sizes: padded(*sizes).to_packed(),
}
EQUAL, DIFFERENT = [(2, 6)] * 3, [(2, 6), (3, 8), (4, 7)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Prepared = Callable[[Tensor], Any]
# From a model, and what compiles (or returns what it is given): the function of a batch.
Habit = Callable[[Net, Callable[..., Any]], Prepared]


def backward_outside(net: Net, compiled: Callable[..., Any]) -> Prepared:
    loss_of = compiled(lambda x: net(x).pow(2).mean())

    def step(x: Tensor) -> Any:
        loss = loss_of(x)
        loss.backward()
        return loss.detach()

    return step


def backward_inside(net: Net, compiled: Callable[..., Any]) -> Prepared:
    @compiled
    def step(x: Tensor) -> Any:
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    return step


def optimizer_inside(net: Net, compiled: Callable[..., Any]) -> Prepared:
    steps = torch.optim.SGD(net.parameters(), lr=0.1)

    @compiled
    def step(x: Tensor) -> Any:
        steps.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        steps.step()
        return loss.detach()

    return step


def gradients_inside(net: Net, compiled: Callable[..., Any]) -> Prepared:
    parameters = list(net.parameters())
    return compiled(lambda x: torch.autograd.grad(net(x).pow(2).mean(), parameters))


def regions(net: Net, compiled: Callable[..., Any]) -> Prepared:
    for block in net.blocks:
        block.forward = compiled(block.forward)
    return backward_outside(net, lambda function: function)


def marked(net: Net, compiled: Callable[..., Any]) -> Prepared:
    step = backward_outside(net, compiled)

    def of_marked(x: Tensor) -> Any:
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        return step(x)

    return of_marked


HABITS: dict[str, tuple[Habit, Sequence[tuple[int, int]], dict[str, Any]]] = {
    "forward compiled": (backward_outside, EQUAL, {"fullgraph": True}),
    "`backward` inside": (backward_inside, EQUAL, {}),
    "`backward` and an optimizer inside": (optimizer_inside, EQUAL, {}),
    "`torch.autograd.grad` inside": (gradients_inside, EQUAL, {}),
    "each block compiled": (regions, EQUAL, {"fullgraph": True}),
    "`mark_dynamic`": (marked, DIFFERENT, {"fullgraph": True}),
    "`dynamic=True`": (backward_outside, DIFFERENT, {"fullgraph": True, "dynamic": True}),
}
INDUCTOR = (backward_outside, EQUAL, {"fullgraph": True, "backend": "inductor"})


def prepared(storage: str, sizes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], Net, Net]:
    """Batches, and two nets alike."""
    torch.manual_seed(0)
    batches = [STORAGES[storage](*size) for size in sizes]
    nets = Net(), Net()
    nets[1].load_state_dict(nets[0].state_dict())
    return batches, *nets


def counted(*numbers: tuple[int, str]) -> str:
    return ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in numbers if count)


def compiled_as(habit: tuple[Habit, Sequence[tuple[int, int]], dict[str, Any]], storage: str) -> str:
    """The graphs of the first batch, and those that later batches add; raises if a result is not that of eager."""
    from torch._dynamo.utils import counters

    prepare, sizes, options = habit
    torch.compiler.reset()
    counters.clear()
    batches, net, its_copy = prepared(storage, sizes)
    eager = prepare(net, lambda function: function)
    compiled = prepare(its_copy, lambda function: torch.compile(function, **{"backend": "aot_eager"} | options))
    first = 0
    for number, x in enumerate(batches):
        same(compiled(x), eager(x))
        for a, b in zip(its_copy.parameters(), net.parameters(), strict=True):
            same((a, a.grad), (b, b.grad)) if b.grad is not None else same(a, b)
        first = first if number else counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    later = counters["stats"]["unique_graphs"] - first
    on_disk = counters["aot_autograd"]["autograd_cache_hit"]
    return counted(
        (first - on_disk, "graph"), (on_disk, "graph from disk"), (breaks, "break"), (later, "recompilation")
    )


def run_as_exported(storage: str, ahead_of_time: bool) -> str:
    """Export a net for any sizes and run the program, or what AOTInductor makes of it; raises as `compiled_as` does."""
    batches, net, _ = prepared(storage, DIFFERENT)
    net.eval()
    shapes = ({0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=5)},)
    export = torch.export.export if storage == "plain" else md.export
    program = export(net, (batches[0],), dynamic_shapes=shapes)
    run: Callable[..., Any] = program.module()
    with tempfile.TemporaryDirectory() as folder:
        if ahead_of_time:
            package = str(Path(folder) / "model.pt2")
            run = torch._inductor.aoti_load_package(
                torch._inductor.aoti_compile_and_package(program, package_path=package)
            )
        for x in batches:
            wanted = net(x).detach()
            if storage == "plain":
                same(run(x), wanted)
            else:
                same(run((x.to_dense().get_data(), x.get_mask())), (wanted.to_tensor(0), wanted.get_mask()))
    return "1 program"


@functools.cache
def of_processes(storage: str) -> tuple[str, ...]:
    """What two processes count that compile with inductor, one after the other, with one cache on disk."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, storage]
        runs = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert not any(run.returncode for run in runs), runs[-1].stderr
    return tuple(run.stdout.splitlines()[-1] for run in runs)


# Those that take minutes: what each counts for a storage.
SLOW: dict[str, Callable[[str], str]] = {
    "inductor": lambda storage: of_processes(storage)[0],
    "inductor, in a second process": lambda storage: of_processes(storage)[1],
    "exported": lambda storage: run_as_exported(storage, ahead_of_time=False),
    "exported, AOTInductor": lambda storage: run_as_exported(storage, ahead_of_time=True),
}


def row(habit: str) -> str:
    outcome = SLOW.get(habit) or functools.partial(compiled_as, HABITS[habit])
    return " | ".join((f"| {habit}", *(outcome(storage) for storage in STORAGES))) + " |"


PAGE = """# Compiled training steps

Written by `python tests/helpers/compiled_habits.py > docs/results/compiled.md`, in five minutes. A model of two blocks
and a linear layer trains on three batches, compiled as each row says, by `aot_eager` unless the row names inductor. In
the rows `mark_dynamic` and `dynamic=True`, the batches have different sizes. All results, gradients and parameters are
those of the same step without `torch.compile`. The table counts the graphs of the first batch, the graph breaks, and
the graphs that later batches add (recompilations), for plain tensors and three kinds of masked tensors. A graph from
disk was compiled by an earlier process.

In the last two rows, the model is exported by `md.export` (with plain tensors by `torch.export.export`) for batches of
any size, and the program has the model's results on three sizes. A packed batch is exported in dense storage.
"""

if __name__ == "__main__" and len(sys.argv) > 1:
    print(compiled_as(INDUCTOR, sys.argv[1]))
elif __name__ == "__main__":
    print(PAGE)
    print(f"| | {' | '.join(STORAGES)} |")
    print("|---" * (len(STORAGES) + 1) + "|")
    for habit in (*HABITS, *SLOW):
        print(row(habit), flush=True)
