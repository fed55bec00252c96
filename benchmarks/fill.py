"""Eager fills without a derivative: bit operations (op_registry/records/fill.py) beside torch.where and masked_fill.

float32, half valid: at random, and the first half of each row, which a branch predictor learns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness import Call, Goal, duration, measure, print_table, progress, timing
from op_registry.records.dense import fill_where_invalid
from op_registry.records.validity import as_int8

SIZES = (64, 2048)
VALUES = {"0": 0.0, "-inf": float("-inf")}


def masks(size: int) -> dict[str, Tensor]:
    """Masks of which half is True."""
    torch.manual_seed(0)
    return {
        "random": torch.rand(size, size) < 0.5,
        "half a row": (torch.arange(size) < size // 2).expand(size, size).contiguous(),
    }


def candidates(size: int, mask: Tensor, value: float) -> dict[str, Call]:
    """The same fill three ways, checked against each other."""
    data = torch.randn(size, size)
    validity, invalid = as_int8(mask), ~mask
    calls: dict[str, Call] = {
        "torch.where": lambda: torch.where(mask, data, value),
        "masked_fill": lambda: data.masked_fill(invalid, value),
        "masked_dispatch": lambda: fill_where_invalid(data, validity, value),
    }
    expected = torch.where(mask, data, value)
    for name, call in calls.items():
        assert torch.equal(call(), expected), name  # type: ignore[arg-type]
    return calls


def run(rounds: int = 41) -> list[Goal]:
    rows, goals = [], []
    for size in progress(SIZES, "fill"):
        for pattern, mask in masks(size).items():
            for name, value in VALUES.items():
                measured = measure(candidates(size, mask, value), rounds=rounds)
                own = measured["masked_dispatch"]
                faster = {c: timing(measured[c], own) for c in ("torch.where", "masked_fill")}
                label = f"{size}², {pattern}, {name}"
                rows.append([label, duration(timing(own, own).seconds), *map(str, faster.values())])
                if size == max(SIZES) and pattern == "random":
                    goals.append(
                        Goal(f"fill {label}: times faster than where", faster["torch.where"].ratio, 2, at_least=True)
                    )
    print_table(
        "eager fills, float32, half valid",
        ("", "masked_dispatch", "torch.where ×", "masked_fill ×"),
        rows,
    )
    return goals
