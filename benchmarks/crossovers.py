"""The density below which a sparse layout is quicker than dense storage, and what all-valid tensors cost (R11).

The first is no goal but a table, which docs/storage.md shows: for each kind of operator and each size, measured on this
machine. Conversions are not counted. Every layout's result is compared with the dense one before it is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, measure, print_table, progress, thread_seconds, timing

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
DENSITIES = (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9)
# Single elements in CSR, or whole rows of padded sequences, packed.
STRUCTURES = {"elements": torch.sparse_csr, "rows": torch.jagged}
# Where more is stored, neither building nor running a sparse form fits into a short benchmark.
MOST = 4e7
# A sparse form has to be quicker by this factor to count: where both are as quick, dense storage is simpler.
WORTH = 1.05

WORK: dict[str, Callable[[md.MaskedTensor, Tensor], Tensor]] = {
    "x * x": lambda x, dense: x * x,
    "x.exp()": lambda x, dense: x.exp(),
    "x.sum(-1)": lambda x, dense: x.sum(-1),
    "x.softmax(-1)": lambda x, dense: x.softmax(-1),
    "x @ dense": lambda x, dense: x @ dense,
}


def tensor(size: int, density: float, structure: str) -> md.MaskedTensor:
    """size² elements, of which some, or some whole rows of padded sequences, are valid."""
    torch.manual_seed(0)
    if structure == "elements":
        return md.as_masked_tensor(torch.randn(size, size), torch.rand(size, size) < density)
    shape = (size // 32, 32, size)
    return md.as_masked_tensor(torch.randn(shape), torch.rand(*shape[:2], 1) < density)


def check(found: Tensor, wanted: Tensor, where: str) -> None:
    """A result is what dense storage gives, and valid in the same places."""
    assert isinstance(found, md.MaskedTensor)
    assert isinstance(wanted, md.MaskedTensor)
    assert torch.equal(found.get_mask(), wanted.get_mask()), f"{where}: valid elsewhere"
    torch.testing.assert_close(
        found.to_tensor(0), wanted.to_tensor(0), rtol=1e-3, atol=1e-3, msg=lambda m: f"{where}: {m}"
    )


def crossover(size: int, name: str, structure: str, densities: tuple[float, ...]) -> float:
    """The density at which the sparse form stops being quicker, interpolated between the densities that are tried."""
    before: tuple[float, float] | None = None
    other = torch.randn(size, 64)
    for density in densities:
        if size * size * density > MOST:
            break
        x = tensor(size, density, structure)
        stored = x.to_layout(STRUCTURES[structure])
        check(WORK[name](stored, other), WORK[name](x, other), f"{name}, {size}², {density:g}, {structure}")
        dense, sparse = (best_of(lambda t=t: WORK[name](t, other)) for t in (x, stored))  # type: ignore[misc]
        ratio = math.log(WORTH * sparse / dense)
        if ratio >= 0:
            if before is None:
                return 0.0
            # Both logarithms are interpolated linearly.
            share = before[1] / (before[1] - ratio)
            return math.exp(math.log(before[0]) + share * math.log(density / before[0]))
        before = (density, ratio)
    return 0.0 if before is None else before[0]


def best_of(call: Call, times: int = 5) -> float:
    """The least time of a call, in seconds."""
    call()
    once = thread_seconds(call, 1)
    return min(thread_seconds(call, max(1, round(1e-3 / max(once, 1e-9)))) for _ in range(times))


def in_words(density: float, densities: tuple[float, ...]) -> str:
    """A crossover as the table has it."""
    if density == 0:
        return "dense"
    return "sparse" if density >= densities[-1] else f"{density:.1%}"


def run(rounds: int = 5, sizes: tuple[int, ...] = SIZES, densities: tuple[float, ...] = DENSITIES) -> list[Goal]:
    for structure, layout in STRUCTURES.items():
        rows = [
            [f"{size}²", *(in_words(crossover(size, name, structure, densities), densities) for name in WORK)]
            for size in progress(sizes, f"crossovers, {structure}")
        ]
        print_table(f"valid {structure}, {layout}: quicker below", ("", *WORK), rows)
    return all_valid(rounds)


def all_valid(rounds: int) -> list[Goal]:
    """What a masked tensor without a mask costs beside a plain one, 2048²."""
    plain, goals = torch.randn(2048, 2048), []
    x, dense = md.as_masked_tensor(plain), torch.randn(2048, 64)
    for name, work in WORK.items():
        both: dict[str, Call] = {
            "masked": lambda work=work: work(x, dense),  # type: ignore[misc]
            "plain": lambda work=work: work(plain, dense),  # type: ignore[misc]
        }
        torch.testing.assert_close(work(x, dense).to_tensor(0), work(plain, dense))  # type: ignore[attr-defined,arg-type]
        seconds = measure(both, rounds=max(rounds, 11), at_least=2e-2)
        goals.append(
            Goal(
                f"all valid, 2048², {name}: times plain torch", timing(seconds["masked"], seconds["plain"]).ratio, 1.05
            )
        )
    return goals
