"""R4: a chain of six elementwise operators on two masked tensors of one mask, beside the chain on plain tensors.

float32, half valid at random. In eager mode the reference is the plain chain in eager mode; compiled, the plain chain
compiled, which is one fused kernel. What is under the mask is computed too and nobody sees it, so neither has to read
the mask. Results are compared before anything is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

import masked_dispatch as md
from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing

SIZES = ((64, 64), (2048, 2048), (8192, 4096))
PLAIN, PLAIN_COMPILED = "plain", "plain, compiled"
MASKED, MASKED_COMPILED = "masked", "masked, compiled"
WHERE, WHERE_COMPILED = "by hand", "by hand, compiled"


def chain(x: Tensor, y: Tensor) -> Tensor:
    return ((x * y + x).relu() * 0.5 - y).clamp(-1, 1)


def by_hand(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The chain whose result is zero where it is invalid, as a person writes it."""
    return torch.where(mask, chain(x, y), 0)


def candidates(size: tuple[int, int], device: str = "cpu") -> dict[str, Call]:
    """The chain in every way, checked against each other."""
    torch.manual_seed(0)
    with torch.device(device):
        x, y, mask = torch.randn(size), torch.randn(size), torch.rand(size) < 0.5
    a = md.masked_tensor(x, mask)
    b = md.mask_like(y, a)
    compiled, compiled_masked = (torch.compile(chain, fullgraph=True) for _ in range(2))
    compiled_hand = torch.compile(by_hand, fullgraph=True)
    calls: dict[str, Call] = {
        PLAIN: lambda: chain(x, y),
        MASKED: lambda: chain(a, b),
        WHERE: lambda: by_hand(x, y, mask),
        PLAIN_COMPILED: lambda: compiled(x, y),
        MASKED_COMPILED: lambda: compiled_masked(a, b),
        WHERE_COMPILED: lambda: compiled_hand(x, y, mask),
    }
    expected = by_hand(x, y, mask)
    for name, call in calls.items():
        found = call()
        assert isinstance(found, Tensor)
        zeroed = found.to_tensor(0) if md.is_masked_tensor(found) else torch.where(mask, found, 0)
        torch.testing.assert_close(zeroed, expected, msg=lambda m, name=name: f"{name}: {m}")
    return calls


def run(rounds: int = 21, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Goal]:
    rows, goals = [], []
    with torch.no_grad():
        for size in progress(sizes, "chain"):
            torch.compiler.reset()
            measured = measure(candidates(size), rounds=rounds)
            eager = {c: timing(measured[c], measured[PLAIN]) for c in (PLAIN, MASKED, WHERE)}
            fused = {c: timing(measured[c], measured[PLAIN_COMPILED]) for c in (MASKED_COMPILED, WHERE_COMPILED)}
            plain = [timing(measured[c], measured[c]).seconds for c in (PLAIN, PLAIN_COMPILED)]
            label = f"{size[0]} × {size[1]}"
            rows.append(
                [label, duration(plain[0]), str(eager[MASKED]), str(eager[WHERE]), duration(plain[1])]
                + [str(fused[c]) for c in (MASKED_COMPILED, WHERE_COMPILED)]
            )
            goals.append(Goal(f"chain, {label}, eager: × plain", eager[MASKED].ratio, 4 if size[0] == 64 else 1.15))
            goals.append(Goal(f"chain, {label}, compiled: × plain compiled", fused[MASKED_COMPILED].ratio, 1.2))
    print_table(
        "six elementwise operators on two float32 tensors of one random mask",
        ("", "plain, eager", "masked ×", "by hand ×", "plain, compiled", "masked ×", "by hand ×"),
        rows,
    )
    return goals
