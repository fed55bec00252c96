"""``python -m benchmarks [NAME ...]``: run the named benchmarks, or all of them, and print each goal's fate.

Large fresh tensors are bound by page faults and by the page table on many machines, so the allocator is pinned (glibc:
it keeps its memory, and asks for huge pages): the process starts itself again with that setting.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"
NAMES = (
    "overhead",
    "fill",
    "eager_reductions",
    "chain",
    "training",
    "packed",
    "reductions",
    "graphs",
    "compiled_training",
    "masked_mean",
    "sparse",
    "conversions",
    "untouched",
    "adagrad",
    "crossovers",
    "compile",
    "dynamic",
    "memory",
    "xla",
)

# `--quick`: few rounds, and less of what takes minutes to compile or to convert. All of them take about ten minutes.
QUICK: dict[str, dict[str, Any]] = {
    "overhead": {"rounds": 15},
    "fill": {"rounds": 9},
    "eager_reductions": {"rounds": 5},
    "chain": {"rounds": 7},
    "training": {"rounds": 7},
    "packed": {"rounds": 5},
    "reductions": {"rounds": 5},
    "graphs": {"names": ("mean", "var", "softmax", "layer_norm")},
    "compiled_training": {"rounds": 5, "layers": 1},
    "masked_mean": {"rounds": 7},
    "sparse": {"rounds": 5},
    "conversions": {"rounds": 3},
    "untouched": {"rounds": 101, "imports": 3},
    "adagrad": {"rounds": 7},
    "crossovers": {"rounds": 5, "sizes": (64, 512), "densities": (0.01, 0.1, 0.9)},
    "compile": {"rounds": 1},
    "dynamic": {"rounds": 1, "layers": (1, 2)},
    "memory": {"rounds": 1},
    "xla": {"rounds": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the project promises.",
        epilog="examples:\n  python -m benchmarks fill --rounds 5 --json fill.json\n"
        "  python -m benchmarks all --quick --json all.json && python -m benchmarks.page all.json\n\n"
        "exit codes: 0 measured, whether or not the goals are reached; 1 an error; 2 an unknown name or option",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; or all, the default")
    parser.add_argument("--rounds", type=int, help="how many times the candidates take turns")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: all in about ten minutes")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write goals and tables, with machine, versions and date"
    )
    arguments = parser.parse_args()
    names = NAMES if arguments.names in ([], ["all"]) else tuple(arguments.names)
    unknown = set(names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")

    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = ALLOCATOR
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])

    import torch

    from benchmarks.harness import Goal, Unavailable, as_json, console, print_goals

    torch.set_num_threads(1)
    console.print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread, thread CPU time, "
        f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '–')}"
    )
    goals: dict[str, list[Goal]] = {}
    seconds: dict[str, float] = {}
    for name in names:
        console.rule(name)
        options = dict(QUICK[name]) if arguments.quick else {}
        if arguments.rounds is not None:
            options["rounds"] = arguments.rounds
        start = time.perf_counter()
        try:
            goals[name] = importlib.import_module(f"benchmarks.{name}").run(**options)
        except Unavailable as reason:
            console.print(f"{name} is skipped: {reason}", markup=False)
            continue
        seconds[name] = time.perf_counter() - start
        if arguments.json is not None:  # what has been measured is kept if a later benchmark fails
            arguments.json.write_text(as_json(goals, seconds) + "\n", encoding="utf-8")
    print_goals([goal for of_one in goals.values() for goal in of_one])


if __name__ == "__main__":
    main()
