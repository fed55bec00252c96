"""Whether a repeated call gives the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import torch

REPETITIONS = 64
SIZES = (8, 16, 48, 64, 100, 128, 200, 256, 512, 1000, 3000)  # of small tensors in bytes

T = TypeVar("T")


def repeats_itself(run: Callable[[], T], first: T, same: Callable[[T, T], bool]) -> bool:
    """Whether every further `run`, with its tensors elsewhere in memory, gives the first run's result.

    Some LAPACK routines sum in an order that depends on the address of their operands, and one starts from memory that
    torch has not initialised (the pivots of lstsq's gelsy): one call in five then differs in its last bits.
    """
    sizes = random.Random(0)
    # These live tensors occupy the memory that the next run would otherwise reuse.
    kept: list[object] = [first]
    for _ in range(REPETITIONS):
        kept += [torch.empty(sizes.choice(SIZES), dtype=torch.uint8) for _ in range(sizes.randrange(30))]
        again = run()
        kept.append(again)
        if not same(again, first):
            return False
    return True
