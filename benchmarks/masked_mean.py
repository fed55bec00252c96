"""R9: the masked mean of per-element losses and its gradient, with a new mask in every step.

losses (32, 512, 256), float32, 20 masks of which half is valid. The limit is one pass of a C++ kernel that sums what is
valid, and one that writes the gradient into memory kept for it. Compiled candidates are compiled once; how many graphs,
breaks and recompiles the 20 masks make is counted, and peak memory is that of a step in a process of its own, beyond
the losses, in multiples of the gradient. Loss and gradient are compared before anything is timed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.graphs import Graphs, counted
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from benchmarks.kernels import OnePass
from benchmarks.peak import GIVING_BACK, peak_of_call, peak_of_process

SIZE, MASKS = (32, 512, 256), 20
LIMIT, SELECT, WHERE, TORCH_MASKED = "one-pass kernels", "index by the mask", "torch.where", "torch.masked.mean"
MASKED = "masked_dispatch"
COMPILED = ", compiled"
# Of the loss and its gradient, for one mask.
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    SELECT: lambda losses, mask: losses[mask].mean(),
    WHERE: lambda losses, mask: torch.where(mask, losses, 0).sum() / mask.sum(),
    TORCH_MASKED: lambda losses, mask: torch.masked.mean(losses, mask=mask),
}


def plain_step(mean: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = losses.detach().requires_grad_()
        loss = mean(leaf, mask)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    return step


def masked_step(compiled: bool) -> Step:
    def masked_mean(losses: Tensor) -> Tensor:
        return losses.mean()

    mean = torch.compile(masked_mean) if compiled else masked_mean

    def step(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = md.as_masked_tensor(losses, mask).requires_grad_()
        loss = mean(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    return step


def steps() -> dict[str, Callable[[], Step]]:
    """Each way to take the step, made when it is asked for: what is compiled is compiled then."""
    made: dict[str, Callable[[], Step]] = {name: lambda mean=mean: plain_step(mean) for name, mean in MEANS.items()}  # type: ignore[misc]
    made[WHERE + COMPILED] = lambda: plain_step(torch.compile(MEANS[WHERE]))
    made[MASKED] = lambda: masked_step(compiled=False)
    made[MASKED + COMPILED] = lambda: masked_step(compiled=True)
    return made


def some_masks() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(SIZE) < 0.5 for _ in range(MASKS)]


def limit(losses: Tensor, masks: list[Tensor]) -> Call:
    """The sum of what is valid, and the gradient, by kernels; the masks are int8 already."""
    flat = losses.view(1, -1)
    kernels = [OnePass("mean", flat, mask.to(torch.int8).view(1, -1)) for mask in masks]
    gradient, shared = torch.ones(1), torch.empty_like(flat)
    for kernel in kernels:
        kernel.gradient = shared
    turn = itertools.cycle(kernels)
    return lambda: next(turn).forward_backward(gradient)


def check(calls: Mapping[str, Call], expected: tuple[Tensor, Tensor]) -> None:
    """Every step gives this loss and this gradient."""
    for name, call in calls.items():
        for found, right in zip(call(), expected, strict=True):  # type: ignore[call-overload]
            plain = found.to_tensor(0) if md.is_masked_tensor(found) else found
            torch.testing.assert_close(
                plain, right.float(), rtol=1e-3, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )


def candidates() -> tuple[dict[str, Call], dict[str, Graphs]]:
    """The steps, each with a new mask at every call, and what compiling them took; checked against each other."""
    masks = some_masks()
    losses = torch.randn(SIZE)
    calls: dict[str, Call] = {LIMIT: limit(losses, masks)}
    graphs = {}
    expected = plain_step(MEANS[WHERE])(losses.double(), masks[0])
    for name, make in steps().items():
        step = make()
        if COMPILED in name:
            graphs[name] = counted(lambda mask, step=step: step(losses, mask), masks)  # type: ignore[misc]
        check({name: lambda step=step: step(losses, masks[0])}, expected)  # type: ignore[misc]
        turn = itertools.cycle(masks)
        calls[name] = lambda step=step, turn=turn: step(losses, next(turn))  # type: ignore[misc]
    return calls, graphs


def measure_peak(name: str) -> float:
    """What a step takes at most beyond the losses, in multiples of the gradient, in this process."""
    torch.set_num_threads(1)
    step, losses = steps()[name](), torch.randn(SIZE)
    first, second = (torch.rand(SIZE) < 0.5 for _ in range(2))
    step(losses, first)
    return peak_of_call(lambda: step(losses, second)) * 2**20 / losses.nbytes


def peak_of(name: str) -> float:
    return peak_of_process("benchmarks.masked_mean", name, allocator=GIVING_BACK)


def run(rounds: int = 11) -> list[Goal]:
    calls, graphs = candidates()
    measured = measure(calls, rounds=rounds, at_least=1e-2)
    ratios = {name: timing(seconds, measured[LIMIT]) for name, seconds in measured.items()}
    names = list(steps())
    peaks = {n: peak_of(n) for n in progress(names, "peak memory")} if sys.platform == "linux" else {}
    print_table(
        f"masked mean of {SIZE} losses, forward and backward, {MASKS} masks",
        ("", "time", "× kernels", "peak ÷ gradient", "graphs", "breaks", "recompiles"),
        [
            (name, duration(t.seconds), str(t), f"{peaks[name]:.2f}" if name in peaks else "–")
            + (graphs[name].cells() if name in graphs else ("–",) * 3)
            for name, t in ratios.items()
        ],
    )
    own = MASKED + COMPILED
    goals = [Goal("masked-mean step, compiled: × one-pass kernels", ratios[own].ratio, 1.4)]
    goals += [Goal("masked-mean step, eager: × torch.where", timing(measured[MASKED], measured[WHERE]).ratio, 1.0)]
    if peaks:
        goals.append(Goal("masked-mean step, compiled: peak ÷ the gradient", round(peaks[own], 1), 1.0))
    return goals + graphs[own].goals(f"masked-mean step, {MASKS} masks")


if __name__ == "__main__":
    print(measure_peak(*sys.argv[1:]))
