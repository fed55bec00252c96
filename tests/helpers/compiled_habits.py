"""Ways to compile a training step, with plain tensors and masked ones: graphs, graph breaks and recompilations, and the
same results as without compiling. Run as a program, this prints docs/results/compiled.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import masked_dispatch as md
from compiled_regions import Backend, same

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


def outcome(habit: str, storage: str) -> str:
    """The graphs of the first batch, and those that later batches add; raises if a result is not that of eager."""
    from torch._dynamo.utils import counters

    prepare, sizes, options = HABITS[habit]
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    batches = [STORAGES[storage](*size) for size in sizes]
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    backend = Backend()
    eager = prepare(nets[0], lambda function: function)
    compiled = prepare(nets[1], lambda function: torch.compile(function, backend=backend, **options))
    first = 0
    for number, x in enumerate(batches):
        same(compiled(x), eager(x))
        for a, b in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            same((a, a.grad), (b, b.grad)) if b.grad is not None else same(a, b)
        first = first if number else backend.graphs
    breaks = sum(counters["graph_break"].values())
    counted = ((first, "graph"), (breaks, "break"), (backend.graphs - first, "recompilation"))
    return ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counted if count)


def row(habit: str) -> str:
    return " | ".join((f"| {habit}", *(outcome(habit, storage) for storage in STORAGES))) + " |"


PAGE = """# Compiled training steps

Written by `python tests/helpers/compiled_habits.py > docs/results/compiled.md`. A model of two blocks and a linear
layer trains on three batches, compiled as each row says. In the last two rows, the batches have different sizes. All
results, gradients and parameters are those of the same step without `torch.compile`. The table counts the graphs of the
first batch, the graph breaks, and the graphs that later batches add (recompilations), for plain tensors and three kinds
of masked tensors.
"""

if __name__ == "__main__":
    print(PAGE)
    print(f"| | {' | '.join(STORAGES)} |")
    print("|---" * (len(STORAGES) + 1) + "|")
    for habit in HABITS:
        print(row(habit), flush=True)
