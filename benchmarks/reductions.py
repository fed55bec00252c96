"""Compiled masked reductions over the last dimension: 2048², float32, a random mask, half valid.

Four candidates: masked_dispatch under torch.compile; the line that people write by hand, `torch.where` with a bool
mask, under torch.compile; a one-pass C++ kernel, which is what the machine can do (kernels.cpp); and the same operation
on the same data without a mask, under torch.compile, which is what a mask that costs nothing would take.
The gradient of forward+backward is handed in, and every candidate gives a gradient for x. Masked in, masked out: what
comes before and after is no part of the figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, console, duration, measure, print_table, progress, timing
from benchmarks.kernels import ELEMENTWISE_RESULT, OnePass

SIZE = 2048

# Operation → candidate → seconds, round by round.
Measured = dict[str, dict[str, list[float]]]

MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "amax": lambda x: x.amax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}


def _moments_by_hand(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = m.sum(-1, keepdim=True)
    deviation = torch.where(m, x - torch.where(m, x, 0).sum(-1, keepdim=True) / n, 0)
    return deviation, (deviation * deviation).sum(-1, keepdim=True), n


def _var_by_hand(x: Tensor, m: Tensor) -> Tensor:
    _, squares, n = _moments_by_hand(x, m)
    return (squares / (n - 1)).squeeze(-1)


def _layer_norm_by_hand(x: Tensor, m: Tensor) -> Tensor:
    deviation, squares, n = _moments_by_hand(x, m)
    return deviation * torch.rsqrt(squares / n + 1e-5)


BY_HAND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, m: torch.where(m, x, 0).sum(-1),
    "mean": lambda x, m: torch.where(m, x, 0).sum(-1) / m.sum(-1),
    "var": _var_by_hand,
    "std": lambda x, m: _var_by_hand(x, m).sqrt(),
    "amax": lambda x, m: torch.where(m, x, -torch.inf).amax(-1),
    "logsumexp": lambda x, m: torch.where(m, x, -torch.inf).logsumexp(-1),
    "softmax": lambda x, m: torch.where(m, x, -torch.inf).softmax(-1),
    "layer_norm": _layer_norm_by_hand,
}

# How many times faster than the hand-written line (the promise of this release), and how near to the one-pass kernel
# (R1, forward; R2, forward and backward).
FASTER_THAN_BY_HAND = {"mean": 8, "layer_norm": 7, "softmax": 6}
FORWARD_LIMIT = {"sum": 1.3, "mean": 1.3, "layer_norm": 1.3}, 2.0
BOTH_LIMIT = {"amax": 3.0}, 1.5


def candidates(name: str, size: int = SIZE, device: str = "cpu") -> tuple[dict[str, Call], dict[str, Call]]:
    """The candidates of one operation, forward and forward+backward, checked against each other.

    The one-pass kernel is there on the CPU alone; elsewhere the line by hand says what is right.
    """
    torch.manual_seed(0)
    data = torch.randn(size, size, device=device)
    mask = torch.rand(size, size, device=device) < 0.5
    g = torch.randn(data.shape if name in ELEMENTWISE_RESULT else data.shape[:1], device=device)

    masked = md.masked_tensor(data, mask)
    masked_leaf = md.masked_tensor(data, mask, requires_grad=True)
    MASKED[name](masked)  # a refusal reads better here than from within the compiler
    leaf = data.clone().requires_grad_()
    by_hand = torch.compile(BY_HAND[name], fullgraph=True)
    masked_g = md.as_masked_tensor(g)
    through_mask = torch.compile(MASKED[name], fullgraph=True)
    unmasked = torch.compile(MASKED[name], fullgraph=True)
    kernel = OnePass(name, data, mask.to(torch.int8)) if device == "cpu" else None

    forward: dict[str, Call] = {} if kernel is None else {"one-pass kernel": kernel.forward}
    forward |= {
        "masked_dispatch": torch.no_grad()(lambda: through_mask(masked)),
        "by hand": torch.no_grad()(lambda: by_hand(data, mask)),
        "unmasked": torch.no_grad()(lambda: unmasked(data)),
    }
    both: dict[str, Call] = {} if kernel is None else {"one-pass kernel": lambda: kernel.forward_backward(g)}
    both |= {
        "masked_dispatch": lambda: torch.autograd.grad(through_mask(masked_leaf), masked_leaf, masked_g)[0],
        "by hand": lambda: torch.autograd.grad(by_hand(leaf, mask), leaf, g)[0],
        "unmasked": lambda: torch.autograd.grad(unmasked(leaf), leaf, g)[0],
    }
    for calls in (forward, both):
        expected = calls["by hand" if kernel is None else "one-pass kernel"]().clone()  # type: ignore[attr-defined]
        for candidate, call in calls.items():
            result = call()
            if candidate == "unmasked":
                continue
            plain = result.to_tensor(0.0) if md.is_masked_tensor(result) else result
            torch.testing.assert_close(
                plain, expected, rtol=1e-3, atol=1e-4, msg=lambda m, c=candidate: f"{name}, {c}: {m}"
            )
    return forward, both


def report(direction: str, measured: Measured, special: dict[str, float], usual: float) -> list[Goal]:
    """Print what was measured in one direction; its goals. `special` and `usual` bound the ratio to the kernel."""
    goals, rows = [], []
    for name, seconds in measured.items():
        kernel, masked, by_hand, unmasked = seconds.values()
        own, hand, faster = timing(masked, kernel), timing(by_hand, kernel), timing(by_hand, masked).ratio
        free = timing(by_hand, unmasked).ratio
        limit = duration(timing(kernel, kernel).seconds)
        rows.append([name, limit, f"{own} [{own.low:.2f}–{own.high:.2f}]", str(hand), f"{faster:.1f}", f"{free:.1f}"])
        if name in FASTER_THAN_BY_HAND:
            promise = f"{name}, {direction}: times faster than by hand"
            goals.append(Goal(promise, faster, FASTER_THAN_BY_HAND[name], at_least=True))
        goals.append(Goal(f"{name}, {direction}: × one-pass kernel", own.ratio, special.get(name, usual)))
    print_table(
        f"masked reductions under torch.compile, {direction}, {SIZE}², half valid",
        (
            "",
            "one-pass kernel",
            "masked_dispatch × kernel",
            "by hand × kernel",
            "times faster than by hand",
            "unmasked: times faster",
        ),
        rows,
    )
    return goals


def run(rounds: int = 21, names: Sequence[str] = tuple(MASKED)) -> list[Goal]:
    refused: list[Goal] = []
    forward: Measured = {}
    both: Measured = {}
    for name in progress(names, "reductions"):
        torch.compiler.reset()
        try:
            calls = candidates(name)
        except md.MaskedSemanticsError as error:
            console.print(f"[red]{name}: refused[/red] {error}")
            refused.append(Goal(f"{name}: refused", math.nan, 1))
            continue
        forward[name], both[name] = (measure(c, rounds=rounds, at_least=5e-3) for c in calls)
    return [
        *refused,
        *report("forward", forward, *FORWARD_LIMIT),
        *report("forward+backward", both, *BOTH_LIMIT),
    ]
