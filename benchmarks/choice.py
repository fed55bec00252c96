"""The automatic choice of representation beside the best single one (R11), and the table that it goes by.

``python -m benchmarks choice`` tries the choice, beside dense storage and several sparse layouts, each of which is
compared with the dense result before it is timed. ``python -m benchmarks.choice --write`` measures the crossovers anew,
on this machine, and writes masked_dispatch/api/crossovers.py. Conversions are not counted.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, measure, print_table, progress, thread_seconds, timing
from masked_dispatch.api import choose as choice
from masked_dispatch.api import crossovers

SIZES = (64, 512, 2048, 8192)
DENSITIES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)
MEASURED_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
MEASURED_DENSITIES = (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9)
STRUCTURES: tuple[choice.Structure, ...] = ("elements", "rows")
# Where more is stored, neither building nor running a sparse form fits into a short benchmark.
MOST = 4e7
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
    """The tensor stored densely, and in the layout that would be chosen if a sparse one were."""
    kept = {str(torch.strided): x}
    if x.numel() * density <= MOST:
        layout, sparse_dim = choice.sparse_form(tuple(x.shape), structure, -1, family)
        kept[str(layout)] = x.to_layout(layout, sparse_dim=sparse_dim)
    return kept


# What else is tried: layouts and sparse dimensions.
OTHER_FORMS: dict[choice.Structure, tuple[tuple[torch.layout, int | None], ...]] = {
    "elements": ((torch.sparse_coo, None), (torch.sparse_csr, None), (torch.sparse_csc, None)),
    "rows": ((torch.sparse_coo, 2), (torch.sparse_csr, 2), (torch.jagged, None)),
}


def all_forms(
    x: md.MaskedTensor, family: str, density: float, structure: choice.Structure
) -> dict[str, md.MaskedTensor]:
    """The tensor in every representation that the choice is compared with."""
    kept = forms(x, family, density, structure)
    if len(kept) > 1:
        for layout, sparse_dim in OTHER_FORMS[structure]:
            if str(layout) not in kept:
                kept[str(layout)] = x.to_layout(layout, sparse_dim=sparse_dim)
    return kept


def calls(stored: dict[str, md.MaskedTensor], family: str) -> dict[str, Call]:
    """The work on each representation."""
    dense = torch.randn(next(iter(stored.values())).shape[-1], 64)
    return {name: lambda x=x: WORK[family](x, dense) for name, x in stored.items()}  # type: ignore[misc]


def check(work: dict[str, Call], where: str) -> None:
    """Every representation gives what dense storage gives, valid in the same places."""
    expected = work[str(torch.strided)]()
    assert isinstance(expected, md.MaskedTensor)
    for name in work.keys() - {str(torch.strided)}:
        found = work[name]()
        assert isinstance(found, md.MaskedTensor)
        assert torch.equal(found.get_mask(), expected.get_mask()), f"{where}, {name}: valid elsewhere"
        torch.testing.assert_close(
            found.to_tensor(0), expected.to_tensor(0), rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{where}, {n}: {m}"
        )


def beside_the_best(seconds: dict[str, list[float]], chosen: str) -> tuple[float, str]:
    """What is chosen, in multiples of the quickest (the median of the rounds' ratios), and the name of the quickest."""
    best = min(seconds, key=lambda name: statistics.median(seconds[name]))
    return timing(seconds[chosen], seconds[best]).ratio, best


def cell(
    x: md.MaskedTensor, family: str, density: float, structure: choice.Structure, rounds: int
) -> tuple[float, str]:
    """How the choice for one family fares beside the best, and the same as text; 1 where nothing else was tried."""
    stored = all_forms(x, family, density, structure)
    choose = choice.choose(x, density, family, structure=structure)
    chosen = str(choose.layout)
    if choose.all_valid:
        stored[chosen] = choose.of(x)
    if len(stored) == 1:
        return 1.0, "only dense" if chosen in stored else f"not tried: {chosen}"
    work = calls(stored, family)
    check(work, f"{family}, {tuple(x.shape)}, {density:g}")
    ratio, best = beside_the_best(measure(work, rounds=rounds, at_least=1e-3, warm_up=1), chosen)
    named = chosen if best == chosen else f"{chosen} for {best}"
    return ratio, f"{ratio:.2f} {named.replace('torch.', '')}"


def run(rounds: int = 5, sizes: tuple[int, ...] = SIZES) -> list[Goal]:
    goals = []
    for structure in STRUCTURES:
        rows, worst = [], dict.fromkeys(WORK, 1.0)
        for size in progress(sizes, f"choice, {structure}"):
            for density in DENSITIES:
                x = tensor(size, density, structure)
                cells = []
                for family in WORK:
                    ratio, text = cell(x, family, density, structure, rounds)
                    worst[family] = max(worst[family], ratio)
                    cells.append(text)
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
        torch.testing.assert_close(work(x, dense).to_tensor(0), work(plain, dense))  # type: ignore[attr-defined,arg-type]
        seconds = measure(both, rounds=max(rounds, 11), at_least=2e-2)
        ratio = timing(seconds["masked"], seconds["plain"]).ratio
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
