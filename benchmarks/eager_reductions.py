"""R3: eager masked reductions over the last dimension, beside the line of `torch.where` that they replace.

float32, half valid: at random, and by whole rows, whose mask has one element for each row. "remembered" is one masked
tensor used again, whose counts and widened mask are known; "fresh" makes the mask anew in each call, as a data loader
does. Results, and gradients, are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from benchmarks.kernels import ELEMENTWISE_RESULT
from benchmarks.reductions import BY_HAND, MASKED

SIZES = (512, 2048)
HAND, REMEMBERED, FRESH = "by hand", "remembered", "fresh"
# In multiples of the hand-written line.
BOUNDS = {"forward": {REMEMBERED: 0.33, FRESH: 0.6}, "forward and backward": {REMEMBERED: 0.6, FRESH: 0.6}}


@dataclass(frozen=True)
class Case:
    """A square of data, a mask of it, and the gradient of the result."""

    data: Tensor
    mask: Tensor
    gradient: Tensor


def case(name: str, size: int, kind: str) -> Case:
    """Data and mask for one operation; `kind` is "random" or "rows"."""
    torch.manual_seed(0)
    mask = torch.rand(size, size if kind == "random" else 1) < 0.5
    gradient = torch.randn(size, size) if name in ELEMENTWISE_RESULT else torch.randn(size)
    return Case(torch.randn(size, size), mask, gradient)


def forward(name: str, given: Case) -> dict[str, Call]:
    """The operation without a derivative, by each candidate."""
    x = md.as_masked_tensor(given.data, given.mask)
    calls: dict[str, Call] = {
        HAND: lambda: by_hand(name, given.data, given.mask),
        REMEMBERED: lambda: MASKED[name](x),
        FRESH: lambda: MASKED[name](md.as_masked_tensor(given.data, given.mask.clone())),
    }
    return calls


def by_hand(name: str, data: Tensor, mask: Tensor) -> Tensor:
    """The hand-written line. A mask of rows counts for every element of the row, as in a masked tensor."""
    return BY_HAND[name](data, mask.expand_as(data))


def forward_backward(name: str, given: Case) -> dict[str, Call]:
    """The operation and the gradient of its operand, by each candidate."""
    leaf = given.data.clone().requires_grad_()
    x = md.as_masked_tensor(given.data, given.mask).requires_grad_()

    def of(result: Tensor, operand: Tensor) -> Tensor:
        return torch.autograd.grad(result, operand, given.gradient)[0]

    def fresh() -> Tensor:
        operand = md.as_masked_tensor(given.data, given.mask.clone()).requires_grad_()
        return of(MASKED[name](operand), operand)

    return {
        HAND: lambda: of(by_hand(name, leaf, given.mask), leaf),
        REMEMBERED: lambda: of(MASKED[name](x), x),
        FRESH: fresh,
    }


def check(name: str, calls: dict[str, Call], mask: Tensor) -> None:
    """Every candidate gives what the line gives, wherever the masked result is valid."""
    expected = calls[HAND]()
    assert isinstance(expected, Tensor)
    for candidate in (REMEMBERED, FRESH):
        found = calls[candidate]()
        assert md.is_masked_tensor(found)
        valid = found.get_mask()
        # What a row without a valid element gives is no number, by hand as well as here.
        kept = valid & mask.any(-1) if valid.ndim == 1 else valid
        torch.testing.assert_close(
            found.to_tensor(0)[kept],
            expected[kept],
            rtol=1e-3,
            atol=1e-4,
            msg=lambda m, at=(name, candidate): f"{at}: {m}",
        )


WAYS: dict[str, Callable[[str, Case], dict[str, Call]]] = {
    "forward": torch.no_grad()(forward),
    "forward and backward": forward_backward,
}


def run(rounds: int = 11, sizes: tuple[int, ...] = SIZES) -> list[Goal]:
    goals = []
    for way, candidates in WAYS.items():
        for size in sizes:
            for kind in ("random", "rows"):
                rows = []
                for name in progress(list(MASKED), f"{way}, {size}², {kind}"):
                    given = case(name, size, kind)
                    calls = candidates(name, given)
                    with torch.set_grad_enabled(way != "forward"):
                        check(name, calls, given.mask)
                        measured = measure(calls, rounds=rounds, warm_up=1)
                    ratios = {c: timing(seconds, measured[HAND]) for c, seconds in measured.items()}
                    rows.append([name, *(f"{t} ({duration(t.seconds)})" for t in ratios.values())])
                    goals += [
                        Goal(f"{name}, {way}, {size}², {kind} mask, {c}: × by hand", ratios[c].ratio, bound)
                        for c, bound in BOUNDS[way].items()
                    ]
                print_table(
                    f"eager reductions, {way}, {size}², half valid, {kind}: × the hand-written line",
                    ("", HAND, REMEMBERED, FRESH),
                    rows,
                )
    return goals
