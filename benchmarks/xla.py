"""The masked mean on XLA, by torchax: compilations over changing masks, values and gradients, memory.

256 × 256 float32, 20 masks of which from 5 % to 81 % is valid. Selecting by the mask is the control: the number of
valid elements is then a shape, and XLA compiles anew for each. Memory is what XLA says that its program for
4096 × 4096 takes beside arguments and results. All on XLA's CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Goal, Unavailable, print_table, progress
from op_registry.conformance.reference_device import compilations

SIZE, MASKS, LARGE = 256, 20, 4096
SELECT, WHERE, MASKED = "masked_select, eager", "torch.where", "masked_dispatch"
# Of the mean and its gradient, for data and a mask.
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    SELECT: lambda data, mask: torch.masked_select(data, mask).mean(),
    WHERE: lambda data, mask: torch.where(mask, data, 0.0).sum() / mask.sum(),
    MASKED: lambda data, mask: md.as_masked_tensor(data, mask).mean().to_tensor(0.0),
}


def step_of(name: str) -> Step:
    """The mean and its gradient by torch's autograd."""
    mean = MEANS[name]

    def step(data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        leaf = data.requires_grad_()
        value = mean(leaf, mask)
        return value, torch.autograd.grad(value, leaf)[0]

    return step


def some_masks() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(SIZE, SIZE) < 0.05 + 0.04 * n for n in range(MASKS)]


def expected(data: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """On the CPU, by indexing."""
    leaf = data.clone().requires_grad_()
    value = leaf[mask].mean()
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def wrong(found: tuple[Any, Any], right: tuple[Tensor, Tensor], mask: Tensor) -> int:
    """How many of the claims about a step do not hold: value, gradient, zero where invalid and nowhere else."""
    value, gradient = (torch.from_numpy(part.numpy()) for part in found)
    claims = (
        torch.allclose(value, right[0], rtol=0, atol=1e-6),
        torch.allclose(gradient, right[1], rtol=0, atol=1e-7),
        bool(gradient[~mask].eq(0).all()),
        bool(gradient[mask].ne(0).all()),
    )
    return claims.count(False)


def temporary_bytes(name: str) -> int:
    """What XLA's program for the step takes beside its arguments and results."""
    import jax
    from torchax.interop import jax_view

    shapes = [jax.ShapeDtypeStruct((LARGE, LARGE), kind) for kind in ("float32", "bool")]
    program = jax.jit(jax_view(step_of(name))).lower(*shapes).compile()
    return int(program.memory_analysis().temp_size_in_bytes)


def run(rounds: int = MASKS) -> list[Goal]:
    """`rounds` is the number of masks."""
    try:
        md.torchax.enable()
    except ImportError as error:
        raise Unavailable(str(error)) from error
    import torchax
    from torchax.interop import jax_jit

    masks = some_masks()[:rounds]
    data = torch.randn(SIZE, SIZE)
    compiled: dict[str, int] = {}
    errors: dict[str, int] = {}
    with torchax.default_env():
        there = data.to("jax")
        moved = [mask.to("jax") for mask in masks]
        with compilations() as counted:
            for mask in progress(moved, SELECT):
                MEANS[SELECT](there, mask)
        compiled[SELECT] = counted.number
        for name in (WHERE, MASKED):
            step = jax_jit(step_of(name))
            with compilations() as counted:
                found = [step(there, mask) for mask in progress(moved, name)]
            compiled[name] = counted.number
            errors[name] = sum(wrong(f, expected(data, m), m) for f, m in zip(found, masks, strict=True))
    memory = {name: temporary_bytes(name) / 2**20 for name in (WHERE, MASKED)}
    print_table(
        f"mean of {SIZE} × {SIZE} under {len(masks)} masks, and its gradient, on XLA:CPU",
        ("", "compilations", "claims that fail", f"MiB beside arguments and results, {LARGE} × {LARGE}"),
        [
            (name, str(number), str(errors.get(name, "–")), f"{memory[name]:.2f}" if name in memory else "–")
            for name, number in compiled.items()
        ],
        caption="claims: value and gradient are those of indexing on the CPU; the gradient is exactly zero at each "
        "invalid and not zero at any valid element. The control is the mean alone, without its gradient.",
    )
    return [
        Goal(f"XLA, masked mean, {len(masks)} masks: compilations", compiled[MASKED], 1),
        Goal(f"XLA, masked mean, {len(masks)} masks: wrong values and gradients", errors[MASKED], 0),
        Goal("XLA, masked mean: memory ÷ torch.where", round(memory[MASKED] / memory[WHERE], 3), 1.01),
        Goal("XLA, the control: compilations for each mask", compiled[SELECT] / len(masks), 1, at_least=True),
    ]
