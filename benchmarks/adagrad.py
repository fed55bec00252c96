"""One Adagrad step of a large table of which few rows were looked up (R8), merging of duplicates included.

A table of 1,000,000 × 64, float32. Gradients as torch's embedding leaves them: indices of the look-ups, duplicates and
all, and a row of values for each. The reference is torch.optim.Adagrad, which coalesces such a gradient first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from benchmarks.peak import peak_of_call, peak_of_process

ROWS, WIDTH = 1_000_000, 64
REFERENCE = "torch.optim.Adagrad"
OWN = "masked_dispatch.optim.Adagrad"
STOCK = f"{REFERENCE}, masked gradient"


def uniform() -> Tensor:
    """12,000 look-ups, of which few meet."""
    return torch.randint(0, ROWS, (12_000,))


def hot() -> Tensor:
    """40,000 look-ups, of which most ask for the same few thousand rows."""
    return (ROWS * torch.rand(40_000).pow(40)).long()


CASES: dict[str, Callable[[], Tensor]] = {"12k uniform": uniform, "40k hot": hot}


def torchs_gradient(index: Tensor) -> Tensor:
    """What torch leaves in the gradient of a table: as many rows as look-ups."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    return torch.sparse_coo_tensor(index.unsqueeze(0), torch.randn(len(index), WIDTH), (ROWS, WIDTH))


def masked_gradient(gradient: Tensor) -> Tensor:
    """The same as masked_dispatch leaves it: merged in the backward pass."""
    leaf = torch.zeros(ROWS, WIDTH, requires_grad=True)
    found = torch.nn.functional.embedding(md.masked_tensor(gradient._indices()[0]), leaf, sparse=True)
    found.backward(md.masked_tensor(gradient._values()))
    assert leaf.grad is not None
    return leaf.grad


def stepping(cls: type[torch.optim.Optimizer], gradient: Tensor, **options: object) -> tuple[Tensor, Call]:
    """A table of zeros, and one step of an optimizer of it."""
    table = torch.nn.Parameter(torch.zeros(ROWS, WIDTH))
    optimizer = cls([table], lr=0.01, **options)  # type: ignore[call-arg]
    table.grad = gradient
    return table, optimizer.step


def by_hand(gradient: Tensor) -> tuple[Tensor, Call]:
    """What a person would write who knows the quickest operators for it."""
    table, state_sum = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    index, values = gradient._indices()[0], gradient._values()

    def step() -> None:
        ordered, order = index.sort()
        rows, counts = ordered.unique_consecutive(return_counts=True)
        g = torch.nn.functional.embedding_bag(order, values, counts.cumsum(0) - counts, mode="sum")
        total = state_sum.index_select(0, rows).addcmul_(g, g)
        state_sum.index_copy_(0, rows, total)
        table.index_add_(0, rows, g.div_(total.sqrt_().add_(1e-10)), alpha=-0.01)

    return table, step


def as_the_tutorial(gradient: Tensor) -> tuple[Tensor, Call]:
    """PyTorch's tutorial on masked tensors, in three lines, on a merged gradient."""
    table, state_sum = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)

    def step() -> None:
        state_sum.addcmul_(gradient, gradient)
        std = md.mask_like(state_sum, gradient).sqrt() + 1e-10  # type: ignore[arg-type]
        table.addcdiv_(gradient, std, value=-0.01)

    return table, step


def candidates(case: str) -> dict[str, Call]:
    """The same step in every way, checked against each other."""
    torch.manual_seed(0)
    gradient = torchs_gradient(CASES[case]())
    merged = masked_gradient(gradient)
    steps = {
        REFERENCE: stepping(torch.optim.Adagrad, gradient),
        OWN: stepping(md.optim.Adagrad, gradient),
        f"{OWN}, fused": stepping(md.optim.Adagrad, gradient, fused=True),
        f"{OWN}, merged in backward": stepping(md.optim.Adagrad, merged),
        "the tutorial's three lines, merged in backward": as_the_tutorial(merged),
        "by hand": by_hand(gradient),
    }
    for name, (table, step) in steps.items():
        step()
        torch.testing.assert_close(
            table.detach(), steps[REFERENCE][0].detach(), msg=lambda m, name=name: f"{name}: {m}"
        )
    calls = {name: step for name, (_, step) in steps.items()}
    calls["torch.optim.SparseAdam"] = stepping(torch.optim.SparseAdam, gradient)[1]
    calls["masked_dispatch.optim.LazyAdam"] = stepping(md.optim.LazyAdam, gradient)[1]
    return calls


def peak_of(case: str, name: str) -> float:
    """What one step allocates at most, in MiB, in a process of its own."""
    return peak_of_process("benchmarks.adagrad", case, name)


def measure_peak(case: str, name: str) -> float:
    """The same, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gradient = torchs_gradient(CASES[case]())
    if name == STOCK:
        gradient = masked_gradient(gradient)
    table, step = stepping(md.optim.Adagrad if name == OWN else torch.optim.Adagrad, gradient)
    if name != STOCK:  # what is imported and made once is no part of it
        table.grad = torchs_gradient(torch.arange(3))
        step()
        table.grad = gradient
    return peak_of_call(step)


def run(rounds: int = 21) -> list[Goal]:
    goals, table = [], {}
    peaks = {}
    for case in progress(list(CASES), "adagrad"):
        measured = measure(candidates(case), rounds=rounds)
        table[case] = {name: timing(seconds, measured[REFERENCE]) for name, seconds in measured.items()}
        goals.append(Goal(f"Adagrad step, {case}: times torch's", table[case][OWN].ratio, 0.7))
        if sys.platform == "linux":
            peaks[case] = {name: peak_of(case, name) for name in (REFERENCE, OWN, STOCK)}
            dense = ROWS * WIDTH * 4 / 2**20
            goals.append(Goal(f"Adagrad step, {case}: peak, in tables", peaks[case][OWN] / dense, 0.1))
    rows = []
    for name in [*next(iter(table.values())), STOCK]:
        times = [table[case].get(name) for case in CASES]
        cells = [f"{t} ({duration(t.seconds)})" if t else "–" for t in times]
        memory = [f"{peaks[case][name]:.1f}" if name in peaks.get(case, {}) else "–" for case in CASES]
        rows.append([name, *cells, *memory])
    columns = ("", *(f"{case} ×" for case in CASES), *(f"{case}, peak MiB" for case in CASES))
    print_table("one step of a 1,000,000 × 64 table, float32", columns, rows)
    return goals


if __name__ == "__main__":
    print(measure_peak(*sys.argv[1:]))
