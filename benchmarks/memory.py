"""R17: memory that an operator takes beyond its operands, at its highest, in multiples of the data; plain and masked.

Each kind runs in a process of its own, whose allocator gives back what is freed at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Goal, print_table, progress
from benchmarks.peak import GIVING_BACK, peak_of_call
from benchmarks.reductions import MASKED
from masked_dispatch import masked_tensor

SIZE = 1024
CALLS: dict[str, Callable[[Tensor], object]] = {
    **MASKED,
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1),
    "topk": lambda x: x.topk(8, -1),
    "median": lambda x: x.median(-1),
    "cdist": lambda x: torch.cdist(x[:, :64], x[:, :64]),
}
# Beyond what plain torch takes, in multiples of the data; cdist's of its result.
GOALS = {name: 2.0 if name == "cdist" else 1.0 for name in CALLS}


def main(kind: str) -> None:
    """Print the MiB of each call as JSON."""
    torch.set_num_threads(1)

    def operand(size: int) -> Tensor:
        torch.manual_seed(0)
        data = torch.randn(size, size)
        return masked_tensor(data, torch.rand(size, size) < 0.5) if kind == "masked" else data

    with torch.no_grad():
        peaks = {}
        for call in CALLS.values():
            call(operand(512))  # what is made once, whatever is called
        for name, call in CALLS.items():
            x = operand(SIZE)
            peaks[name] = peak_of_call(lambda call=call, x=x: call(x))  # type: ignore[misc]
    print(json.dumps(peaks))


def peaks_of(kind: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", kind]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"GLIBC_TUNABLES": GIVING_BACK}
    )
    peaks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def run(rounds: int = 3) -> list[Goal]:
    data = SIZE * SIZE * 4 / 2**20  # MiB
    turns = progress(range(min(rounds, 3)), "memory")
    measured = [(peaks_of("plain"), peaks_of("masked")) for _ in turns]
    rows, goals = [], []
    for name in CALLS:
        plain, masked = (min(peaks[name] for peaks in kind) / data for kind in zip(*measured, strict=True))
        rows.append((name, f"{plain:.2f}", f"{masked:.2f}", f"{masked - plain:.2f}"))
        more = round(masked - plain, 1)  # a fill widens the mask in strips, an eighth of this data
        goals.append(Goal(f"{name}: memory beyond plain torch's, in multiples of the data", more, GOALS[name]))
    print_table(
        f"memory of a call at its highest, {SIZE}², float32, half valid, no derivative",
        ("", "plain", "masked", "more"),
        rows,
        "in multiples of the data (4 MiB), the results included; a new mask for each call",
    )
    return goals


if __name__ == "__main__":
    main(sys.argv[1])
