"""How everything here is measured, and how it is printed.

Candidates take turns: every round measures each of them once, in an order that rotates, and a ratio is taken within
its round. So a machine that is slow for a while is slow for all of them, and the median of the rounds stands.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

try:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
except ImportError:  # `python -m benchmarks.device` needs torch alone, and prints without it
    Console = None

T = TypeVar("T")
Call = Callable[[], object]
Clock = Callable[[Call, int], float]
console = None if Console is None else Console(width=None if Console().is_terminal else 120)


class Unavailable(Exception):
    """A benchmark needs what is not installed; the message says what."""


@dataclass(frozen=True)
class Timing:
    """seconds of one call (median), and its ratio to the reference: the median and the quartiles of the rounds."""

    seconds: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f}" if self.ratio < 9.95 else f"{self.ratio:.0f}"


@dataclass(frozen=True)
class Goal:
    """What was promised, what was measured, and whether that is enough."""

    promise: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def thread_seconds(call: Call, times: int) -> float:
    """Thread CPU seconds of one call, averaged over `times` calls in a row."""
    start = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - start) / times


def event_seconds(call: Call, times: int) -> float:
    """Seconds of one call on a CUDA device, between two events, averaged over `times` calls in a row."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / times


def measure(
    candidates: Mapping[str, Call],
    *,
    rounds: int = 41,
    at_least: float = 2e-3,
    warm_up: int = 3,
    clock: Clock = thread_seconds,
) -> dict[str, list[float]]:
    """Seconds of one call of each candidate, round by round; a measurement lasts `at_least` seconds."""
    times = {}
    for name, call in candidates.items():
        for _ in range(warm_up):
            call()
        times[name] = max(1, round(at_least / max(clock(call, 3), 1e-9)))
    names = list(candidates)
    measured: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for position in range(len(names)):
                name = names[(position + turn) % len(names)]
                measured[name].append(clock(candidates[name], times[name]))
    finally:
        gc.enable()
    return measured


def timing(seconds: Sequence[float], reference: Sequence[float]) -> Timing:
    """The medians of what was measured round by round, beside the reference of the same rounds."""
    ratios = [s / r for s, r in zip(seconds, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Timing(statistics.median(seconds), middle, low, high)


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


# The tables that were printed, as values.
printed_tables: list[dict[str, Any]] = []


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table, and keep it for `as_json`."""
    printed_tables.append({"title": title, "columns": list(columns), "rows": [list(r) for r in rows], "note": caption})
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_goals(goals: Sequence[Goal]) -> None:
    """Every promise with its figure, and whether it is kept."""
    rows = [
        (g.promise, f"{'≥' if g.at_least else '≤'} {g.bound:g}", f"{g.measured:.2f}", "yes" if g.reached else "NO")
        for g in goals
    ]
    print_table("goals", ("", "goal", "measured", "reached"), rows)


def as_json(goals: Mapping[str, Sequence[Goal]], seconds: Mapping[str, float]) -> str:
    """The goals of each benchmark, the tables and how long it took, with the machine, the versions and the date."""
    measured = [
        {"benchmark": name} | asdict(goal) | {"reached": goal.reached}
        for name, of_one in goals.items()
        for goal in of_one
    ]
    document = {
        "command": "benchmarks",
        "benchmarks": list(goals),
        "seconds": {name: round(taken, 1) for name, taken in seconds.items()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "goals": measured,
        "tables": printed_tables,
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def machine() -> dict[str, Any]:
    """What figures depend on besides the versions."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get("GLIBC_TUNABLES", ""),
    }


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a progress bar where a person is watching."""
    return (
        track(items, description, console=console, transient=True)
        if console is not None and console.is_terminal
        else items
    )
