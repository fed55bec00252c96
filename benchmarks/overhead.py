"""R5: what one small eager call costs, 64×64 float32, as a multiple of the same call on plain tensors; without a
derivative, and forward and backward together. Results are compared before anything is timed.

"fresh mask" makes the masked tensor in the call, so nothing is remembered of its mask; it has no goal.
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
CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None, float | None]] = {
    "exp": (lambda x, y: x.exp(), 3, 9),
    "neg": (lambda x, y: -x, 5, 9),
    "x + y, one mask": (lambda x, y: x + y, 5, 9),
    "x + y, two masks": (lambda x, y: x + y, 7, 9),
    "x.sum()": (lambda x, y: x.sum(), 6, 9),
    "x.view(-1)": (lambda x, y: x.view(-1), None, 8),
    "x[1]": (lambda x, y: x.select(0, 1), None, 8),
    "x.transpose(0, 1)": (lambda x, y: x.transpose(0, 1), None, 8),
    "exp, fresh mask": (lambda x, y: x.exp(), None, None),
    "x.sum(), fresh mask": (lambda x, y: x.sum(), None, None),
    "x.sum(-1), fresh mask": (lambda x, y: x.sum(-1), None, None),
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


def fresh_masks(call: Callable[[Tensor, Tensor], Tensor], requires_grad: bool) -> Call:
    """The call on a masked tensor that is made for it, with a mask that has not been seen; and its backward."""
    x, y = operands("masked_dispatch", False, False)
    assert isinstance(x, md.MaskedTensor)
    data, mask = x.get_data(), x.get_mask()
    gradient = torch.ones_like(call(data, y))

    def step() -> Tensor:
        result = call(md.masked_tensor(data, mask, requires_grad=requires_grad), y)
        if requires_grad:
            result.backward(gradient)
        return result

    return step


def values(result: Tensor) -> Tensor:
    """What a call has computed, as a flat plain tensor, zero where it is invalid."""
    if result.is_nested:
        return result.values().detach().flatten()
    return (result.detach().to_tensor(0) if hasattr(result, "to_tensor") else result.detach()).flatten()


def check(name: str, kind: str, x: Tensor, y: Tensor) -> None:
    """The call gives what it gives on tensors that are zero where these are invalid, wherever its result is valid."""
    call = CALLS[name][0]
    result = call(x, y)
    if kind == "NestedTensor":
        expected = call(*operands("plain", False, False))
    elif kind == "plain":
        return
    else:
        expected = torch.where(result.get_mask(), call(x.detach().to_tensor(0), y.detach().to_tensor(0)), 0)
    torch.testing.assert_close(values(result), expected.flatten(), msg=lambda m: f"{name}, {kind}: {m}")


def forward_backward(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Call:
    """The call and its backward from a gradient that is there; leaves keep none, so that every step costs the same."""
    gradient = torch.ones_like(call(x, y).detach())

    def step() -> Tensor:
        result = call(x, y)
        result.backward(gradient)
        x.grad = y.grad = None
        return result

    return step


def candidates(name: str, requires_grad: bool) -> dict[str, Call]:
    """The call on each kind of tensor that has it."""
    call = CALLS[name][0]
    found: dict[str, Call] = {}
    fresh = name.endswith("fresh mask")
    for kind in ("plain", "masked_dispatch") if fresh else ("plain", "masked_dispatch", "torch.masked", "NestedTensor"):
        x, y = operands(kind, name.endswith("two masks"), requires_grad)
        try:
            check(name, kind, x, y)
            if fresh and kind == "masked_dispatch":
                run = fresh_masks(call, requires_grad)
            else:
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
