"""What it takes to trace for any sizes: the first call of a stock encoder with ``dynamic=True``, plain, padded, packed.

The backend compiles nothing, so the seconds are those of tracing, forward and backward together. The kinds take turns,
and each first call starts without any graph. The first result is compared with that of the encoder as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import masked_dispatch as md
from benchmarks.harness import Goal, print_table, progress, thread_seconds

WIDTH, LENGTHS = 8, (7, 3, 5, 1)
PLAIN, PADDED, PACKED = "plain", "padded", "packed"
KINDS = (PLAIN, PADDED, PACKED)


def batch(kind: str) -> Tensor:
    data = torch.randn(len(LENGTHS), max(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(0))
    if kind == PLAIN:
        return data
    padded = md.from_lengths(data, torch.tensor(LENGTHS))
    return padded if kind == PADDED else padded.to_packed()


def first_call(kind: str, layers: int) -> float:
    """Thread CPU seconds of the first call of a compiled encoder."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), batch(kind)
    torch.compiler.reset()
    compiled = torch.compile(encoder, fullgraph=True, dynamic=True, backend="aot_eager")
    found: list[Tensor] = []
    seconds = thread_seconds(lambda: found.append(compiled(x)), 1)
    md.testing.assert_close(found[0], encoder(x))
    return seconds


def run(rounds: int = 3, layers: Sequence[int] = (1, 2, 4)) -> list[Goal]:
    for kind in KINDS:  # (what a process loads once is no part of it)
        first_call(kind, 1)
    turns = [
        {(kind, n): first_call(kind, n) for n in layers for kind in KINDS} for _ in progress(range(rounds), "dynamic")
    ]

    def ratio(above: tuple[str, int], below: tuple[str, int]) -> float:
        return statistics.median(turn[above] / turn[below] for turn in turns)

    rows = [
        [
            f"{n}, {kind}",
            f"{statistics.median(turn[kind, n] for turn in turns):.1f} s",
            f"{ratio((kind, n), (PLAIN, n)):.2f}",
            f"{ratio((kind, n), (kind, layers[0])):.2f}",
        ]
        for n in layers
        for kind in KINDS
    ]
    print_table("first call with dynamic=True", ("layers", "thread CPU", "× plain", f"× {layers[0]} layer"), rows)
    goals = []
    for n in layers:
        depth = f"{n} layer{'s' * (n > 1)}"
        goals.append(Goal(f"{depth}: padded / plain", ratio((PADDED, n), (PLAIN, n)), 2.0))
        goals.append(Goal(f"{depth}: packed / padded", ratio((PACKED, n), (PADDED, n)), 1.3))
    most = layers[-1]
    for kind in (PADDED, PACKED):
        growth = ratio((kind, most), (kind, layers[0]))
        goals.append(Goal(f"{kind}: {most} layers / {layers[0]}", growth, most / layers[0]))
    return goals
