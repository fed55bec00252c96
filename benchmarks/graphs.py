"""R12: what torch.compile makes of masked code: graphs, breaks, recompiles as masks change, and fused kernels.

Each of the masked reductions, forward and backward, beside the line that is written by hand with `torch.where`. Nothing
is timed. Results are compared for every mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.graph import GraphLowering

import masked_dispatch as md
from benchmarks.harness import Goal, print_table, progress
from benchmarks.kernels import ELEMENTWISE_RESULT
from benchmarks.reductions import BY_HAND, MASKED

SIZE, MASKS = 64, 4
# How the code that the compiler writes defines a fused kernel: in C++, or in Triton.
KERNEL = re.compile(r"async_compile\.(?:cpp_pybinding|triton)\(")


@dataclass(frozen=True)
class Graphs:
    """What a first call and the calls after it made the compiler do."""

    graphs: int
    breaks: int
    recompiles: int
    kernels: int

    def cells(self) -> tuple[str, str, str]:
        return str(self.graphs), str(self.breaks), str(self.recompiles)

    def goals(self, promise: str) -> list[Goal]:
        return [
            Goal(f"{promise}: graphs", self.graphs, 1),
            Goal(f"{promise}: graph breaks", self.breaks, 0),
            Goal(f"{promise}: recompiles", self.recompiles, 0),
        ]


def counted(call: Callable[[Tensor], object], operands: Iterable[Tensor]) -> Graphs:
    """What a compiled function makes of operands that it gets one after another: the first is compiled for."""
    counters.clear()
    written: list[str] = []
    first, *others = operands
    # What comes out of the cache is not counted, so nothing does.
    with config.patch(fx_graph_cache=False), patch.object(GraphLowering, "save_output_code", written.append):
        call(first)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        kernels = sum(len(KERNEL.findall(code)) for code in written)
        for operand in others:
            call(operand)
    recompiles = counters["stats"]["unique_graphs"] - graphs
    return Graphs(graphs, breaks, recompiles, kernels)


def ways(name: str) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """A reduction and its gradient as functions of the mask, by hand and masked; neither has been compiled yet."""
    torch.manual_seed(0)
    data = torch.randn(SIZE, SIZE)
    gradient = torch.randn(SIZE, SIZE) if name in ELEMENTWISE_RESULT else torch.randn(SIZE)
    compiled_hand, compiled = torch.compile(BY_HAND[name]), torch.compile(MASKED[name])

    def by_hand(mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = data.clone().requires_grad_()
        result = compiled_hand(leaf, mask)
        return result.detach(), torch.autograd.grad(result, leaf, gradient)[0]

    def masked(mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = md.as_masked_tensor(data, mask).requires_grad_()
        result = compiled(leaf)
        (back,) = torch.autograd.grad(result, leaf, gradient)
        return result.detach().to_tensor(0), back.to_tensor(0)

    return {"by hand": by_hand, "masked": masked}


def run(rounds: int = 1, names: Iterable[str] = tuple(MASKED)) -> list[Goal]:
    """Nothing here has rounds: what is counted is the same each time."""
    rows, goals = [], []
    masks = [torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(i)) < 0.5 for i in range(MASKS)]
    for name in progress(list(names), "graphs"):
        torch.compiler.reset()
        calls = ways(name)
        found = {way: counted(call, masks) for way, call in calls.items()}
        for mask in masks:
            torch.testing.assert_close(calls["masked"](mask), calls["by hand"](mask), rtol=1e-3, atol=1e-4)
        own, hand = found["masked"], found["by hand"]
        rows.append([name, *own.cells(), str(own.kernels), str(hand.kernels)])
        goals += own.goals(f"{name}, {MASKS} masks")
        goals.append(Goal(f"{name}: kernels, beside {hand.kernels} by hand", own.kernels, hand.kernels))
    print_table(
        f"torch.compile, forward and backward, {SIZE}², {MASKS} masks",
        ("", "graphs", "breaks", "recompiles", "kernels", "kernels by hand"),
        rows,
    )
    return goals
