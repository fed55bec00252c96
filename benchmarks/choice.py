"""The automatic choice of representation beside the best single one (R11), and the table that it goes by.

``python -m benchmarks choice`` tries the choice. ``python -m benchmarks.choice --write`` measures the crossovers anew,
on this machine, and writes masked_dispatch/api/crossovers.py. Conversions are not counted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, measure, print_table, progress, thread_seconds
from masked_dispatch.api import choose as choice
from masked_dispatch.api import crossovers

SIZES = (64, 512, 2048, 8192)
DENSITIES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)
MEASURED_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
MEASURED_DENSITIES = (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9)
STRUCTURES: tuple[choice.Structure, ...] = ("elements", "rows")
# Above, neither building nor running the sparse form fits into a short benchmark.
MOST = 2e7
# A sparse form has to be quicker by this factor to be chosen: what is as quick stays dense.
WORTH = 1.05

WORK: dict[str, Callable[[md.MaskedTensor, Tensor], object]] = {
    "arithmetic": lambda x, dense: x * x,
    "transcendental": lambda x, dense: x.exp(),
    "reduction": lambda x, dense: x.sum(-1),
    "slices": lambda x, dense: x.softmax(-1),
    "product": lambda x, dense: x @ dense,
}


def tensor(size: int, density: float, structure: choice.Structure) -> md.MaskedTensor:
    """size² elements, of which some, or some whole rows of padded sequences, are valid."""
    torch.manual_seed(0)
    if structure == "elements":
        return md.as_masked_tensor(torch.randn(size, size), torch.rand(size, size) < density)
    shape = (size // 32, 32, size)
    return md.as_masked_tensor(torch.randn(shape), torch.rand(*shape[:2], 1) < density)


def forms(x: md.MaskedTensor, family: str, density: float, structure: choice.Structure) -> dict[str, md.MaskedTensor]:
    """The tensor in every representation that is chosen from."""
    kept = {str(torch.strided): x}
    if x.numel() * density <= MOST:
        layout, sparse_dim = choice.sparse_form(tuple(x.shape), structure, -1, family)
        kept[str(layout)] = x.to_layout(layout, sparse_dim=sparse_dim)
    return kept


def calls(stored: dict[str, md.MaskedTensor], family: str) -> dict[str, Call]:
    dense = torch.randn(next(iter(stored.values())).shape[-1], 64)
    return {name: lambda x=x: WORK[family](x, dense) for name, x in stored.items()}  # type: ignore[misc]


def run(rounds: int = 5) -> list[Goal]:
    goals = []
    for structure in STRUCTURES:
        rows, worst = [], dict.fromkeys(WORK, 1.0)
        for size in progress([str(s) for s in SIZES], f"choice, {structure}"):
            for density in DENSITIES:
                x = tensor(int(size), density, structure)
                cells = []
                for family in WORK:
                    stored = forms(x, family, density, structure)
                    choose = choice.choose(x, density, family, structure=structure)
                    chosen = str(choose.layout)
                    if choose.all_valid:
                        stored[chosen] = choose.of(x)
                    if len(stored) == 1:
                        cells.append("only dense" if chosen in stored else f"not tried: {chosen}")
                        continue
                    seconds = measure(calls(stored, family), rounds=rounds, at_least=1e-3, warm_up=1)
                    best = min(seconds, key=lambda name: min(seconds[name]))
                    ratio = min(seconds[chosen]) / min(seconds[best])
                    worst[family] = max(worst[family], ratio)
                    cells.append(f"{ratio:.2f} {chosen.removeprefix('torch.')}")
                rows.append([f"{size}², {density:g}", *cells])
        print_table(f"what is chosen, beside the best ({structure})", ("", *WORK), rows)
        goals += [Goal(f"choice for {f}, {structure}: times the best", ratio, 1.2) for f, ratio in worst.items()]
    return [*goals, *all_valid(rounds)]


def all_valid(rounds: int) -> list[Goal]:
    """What a masked tensor without a mask costs beside a plain one, 2048²."""
    plain, goals = torch.randn(2048, 2048), []
    x, dense = md.as_masked_tensor(plain), torch.randn(2048, 64)
    assert choice.choose(x, op="arithmetic").layout is torch.strided
    for family, work in WORK.items():
        both: dict[str, Call] = {
            "masked": lambda work=work: work(x, dense),  # type: ignore[misc]
            "plain": lambda work=work: work(plain, dense),  # type: ignore[misc]
        }
        seconds = {
            name: min(rounds_of) for name, rounds_of in measure(both, rounds=max(rounds, 21), at_least=2e-2).items()
        }
        ratio = seconds["masked"] / seconds["plain"]
        goals.append(Goal(f"all valid, 2048², {family}: times plain torch", ratio, 1.05))
    return goals


# ------------------------------------------------------------------------------------------------------ the table


def crossover(size: int, family: str, structure: choice.Structure) -> float:
    """The density at which the sparse form stops being quicker, interpolated between the densities that are tried."""
    before: tuple[float, float] | None = None
    for density in MEASURED_DENSITIES:
        stored = forms(tensor(size, density, structure), family, density, structure)
        if len(stored) == 1:
            break
        dense, sparse = (best_of(call) for call in calls(stored, family).values())
        ratio = math.log(WORTH * sparse / dense)
        if ratio >= 0:
            if before is None:
                return 0.0
            # Both logarithms are interpolated linearly.
            share = before[1] / (before[1] - ratio)
            return float(f"{math.exp(math.log(before[0]) + share * math.log(density / before[0])):.2g}")
        before = (density, ratio)
    return 0.0 if before is None else before[0]


def best_of(call: Call, times: int = 5) -> float:
    call()
    once = thread_seconds(call, 1)
    return min(thread_seconds(call, max(1, round(1e-3 / max(once, 1e-9)))) for _ in range(times))


def write() -> None:
    """Measure the crossovers and write them down."""
    torch.set_num_threads(1)
    lines = []
    for family in WORK:
        for structure in STRUCTURES:
            key = family if structure == "elements" else f"{family}, by row"
            found = {size: crossover(size, family, structure) for size in MEASURED_SIZES}
            print(key, found, flush=True)
            lines.append(f'    "{key}": {found!r},\n')
    text = (
        '"""Densities below which a sparse form is quicker, by family and size: written by '
        "`python -m benchmarks.choice --write`.\n\n"
        f"Measured: torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread, float32.\n"
        '"""\n\n'
        "CROSSOVERS: dict[str, dict[int, float]] = {\n" + "".join(lines) + "}\n"
    )
    Path(str(crossovers.__file__)).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m benchmarks.choice --write; to try the choice: python -m benchmarks choice")
    write()
