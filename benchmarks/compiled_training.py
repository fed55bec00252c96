"""R15: a compiled training step of the stock nn.TransformerEncoder, beside the same model with its padding mask.

What the first step takes (CPU seconds of this process and of the C++ compiler, out of an empty cache), how many kernels
are made, and what the steps after it take. Gradients are compared before anything is timed.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import torch
from torch._inductor.utils import fresh_cache

from benchmarks.graphs import Graphs, counted
from benchmarks.harness import Call, Goal, console, duration, measure, print_table, timing
from benchmarks.training import DENSE, LARGE, PACKED, PLAIN, candidates, check_steps

MODEL = "nn.TransformerEncoder"
# Times the plain model's: the first step, kernels, the steps after it.
BOUNDS = {DENSE: (1.5, 1.05, 1.0), PACKED: (1.5, 1.05, 0.75)}


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds of this process, and of the processes that it has started and waited for, so far."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), children.ru_utime + children.ru_stime


def first_step(step: Call) -> tuple[Graphs, float, float]:
    """The first call out of an empty cache: what is compiled, and CPU seconds in Python and in the C++ compiler."""
    with fresh_cache(), torch._inductor.config.patch(compile_threads=1):
        before = cpu_seconds()
        graphs = counted(lambda _: step(), [torch.empty(0)])
        python, compiler = (after - b for after, b in zip(cpu_seconds(), before, strict=True))
    return graphs, python, compiler


def warm_up() -> None:
    """Load the compiler, and what it makes once: that is no part of a model's first step."""
    x = torch.randn(8, requires_grad=True)
    first_step(lambda: torch.compile(lambda x: x.exp().sum())(x).backward())


def run(rounds: int = 7, layers: int = LARGE.layers) -> list[Goal]:
    warm_up()
    size = replace(LARGE, layers=layers)
    steps = candidates(MODEL, size, backward=True, compiled=True)
    first = {}
    for name, (_, step) in steps.items():
        console.print(f"compiling: {name}")
        first[name] = first_step(step)
    check_steps(steps)
    measured = measure({name: step for name, (_, step) in steps.items()}, rounds=rounds, warm_up=1)
    rows, goals = [], []
    plain_graphs, *plain_seconds = first[PLAIN]
    for name, (graphs, python, compiler) in first.items():
        steady = timing(measured[name], measured[PLAIN])
        whole = (python + compiler) / sum(plain_seconds)
        rows.append(
            [
                *(name, f"{python:.1f} s", f"{compiler:.1f} s", f"{whole:.2f}"),
                *(str(graphs.graphs), str(graphs.breaks), str(graphs.kernels)),
                *(duration(steady.seconds), str(steady)),
            ]
        )
        if name != PLAIN:
            first_bound, kernels_bound, step_bound = BOUNDS[name]
            label = f"{MODEL} compiled, {name}, × plain"
            goals.append(Goal(f"{label}: first step, CPU seconds", whole, first_bound))
            goals.append(Goal(f"{label}: kernels", graphs.kernels / plain_graphs.kernels, kernels_bound))
            goals.append(Goal(f"{label}: training step", steady.ratio, step_bound))
            goals.append(Goal(f"{MODEL} compiled, {name}: graph breaks", graphs.breaks, 0))
    print_table(
        f"{MODEL} compiled, {size}: training step",
        ("", "first: Python", "first: C++", "× plain", "graphs", "breaks", "kernels", "step", "× plain"),
        rows,
    )
    return goals
