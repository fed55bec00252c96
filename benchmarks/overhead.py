"""R5: what one small eager call costs, 64×64 float32, as a multiple of the same call on plain tensors; without a
derivative, and forward and backward together.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, Timing, console, duration, measure, print_table, progress, timing

SIZE = 64

# What is called, and how dear it may be as a multiple of the plain call: alone, and forward and backward together.
CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None, float]] = {
    "exp": (lambda x, y: x.exp(), 3, 9),
    "neg": (lambda x, y: -x, 5, 9),
    "x + y, one mask": (lambda x, y: x + y, 5, 9),
    "x + y, two masks": (lambda x, y: x + y, 7, 9),
    "x.sum()": (lambda x, y: x.sum(), 6, 9),
    "x.view(-1)": (lambda x, y: x.view(-1), None, 8),
    "x[1]": (lambda x, y: x.select(0, 1), None, 8),
    "x.transpose(0, 1)": (lambda x, y: x.transpose(0, 1), None, 8),
}


def operands(kind: str, two_masks: bool, requires_grad: bool) -> tuple[Tensor, Tensor]:
    """Two 64×64 tensors of a kind: plain, masked_dispatch, torch.masked or NestedTensor (jagged)."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    m, n = (torch.rand(SIZE, SIZE, generator=generator) < 0.5 for _ in range(2))
    if not two_masks:
        n = m
    if kind == "plain":
        return x.requires_grad_(requires_grad), y.requires_grad_(requires_grad)
    if kind == "masked_dispatch":
        a = md.masked_tensor(x, m)
        # One mask *object* on both: what comes of computing with two results of one tensor.
        b = md.masked_tensor(y, n) if two_masks else a * 2
        return a.requires_grad_(requires_grad), b.requires_grad_(requires_grad)
    if kind == "torch.masked":
        return tuple(torch.masked.masked_tensor(t, k, requires_grad=requires_grad) for t, k in ((x, m), (y, n)))
    first = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    second = torch.nested.nested_tensor_from_jagged(y.flatten(), offsets=first.offsets())
    return first.requires_grad_(requires_grad), second.requires_grad_(requires_grad)


def forward_backward(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Call:
    """The call and its backward from a gradient that is there; leaves keep none, so that every step costs the same."""
    gradient = torch.ones_like(call(x, y).detach())

    def step() -> None:
        call(x, y).backward(gradient)
        x.grad = y.grad = None

    return step


def candidates(name: str, requires_grad: bool) -> dict[str, Call]:
    """The call on each kind of tensor that has it."""
    call = CALLS[name][0]
    found: dict[str, Call] = {}
    for kind in ("plain", "masked_dispatch", "torch.masked", "NestedTensor"):
        x, y = operands(kind, name.endswith("two masks"), requires_grad)
        try:
            run = forward_backward(call, x, y) if requires_grad else functools.partial(call, x, y)
            run()
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            if kind in ("plain", "masked_dispatch"):
                raise
            continue  # torch.masked refuses operands whose masks differ, and has no views
        found[kind] = run
    return found


def rows(timings: dict[str, dict[str, Timing]]) -> Iterator[list[str]]:
    for name, by_kind in timings.items():
        others = [str(by_kind[k]) if k in by_kind else "–" for k in ("torch.masked", "NestedTensor")]
        own = by_kind["masked_dispatch"]
        yield [
            name,
            duration(by_kind["plain"].seconds),
            duration(own.seconds),
            f"{own} [{own.low:.2f}–{own.high:.2f}]",
            *others,
        ]


def run(rounds: int = 41) -> list[Goal]:
    warnings.filterwarnings("ignore", module="torch.masked")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # NestedTensor warns at every start
    goals = []
    for requires_grad in (False, True):
        grad = "forward and backward" if requires_grad else "no grad"
        timings = {}
        for name in progress(list(CALLS), grad):
            measured = math.nan
            try:
                with torch.set_grad_enabled(requires_grad):
                    seconds = measure(candidates(name, requires_grad), rounds=rounds)
                timings[name] = {kind: timing(s, seconds["plain"]) for kind, s in seconds.items()}
                measured = timings[name]["masked_dispatch"].ratio
            except md.MaskedSemanticsError as error:
                console.print(f"[red]{name}, {grad}: refused[/red] {error}")
            goal = CALLS[name][2 if requires_grad else 1]
            if goal is not None:
                goals.append(Goal(f"{name}, {grad}", measured, goal))
        print_table(
            f"one eager call on 64×64 float32, {grad}; multiples of the plain call",
            ("", "plain", "masked_dispatch", "× plain", "torch.masked ×", "NestedTensor ×"),
            list(rows(timings)),
        )
    return goals
