"""``python -m benchmarks [NAME ...]``: run the named benchmarks, or all of them, and print each goal's fate.

Large fresh tensors are bound by page faults and by the page table on many machines, so the allocator is pinned (glibc:
it keeps its memory, and asks for huge pages): the process starts itself again with that setting.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592"
NAMES = (
    "overhead",
    "fill",
    "training",
    "packed",
    "reductions",
    "sparse",
    "conversions",
    "untouched",
    "adagrad",
    "choice",
    "compile",
    "memory",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what the project promises.",
        epilog="example:\n  python -m benchmarks fill --rounds 5 --json fill.json\n\n"
        "exit codes: 0 measured, whether or not the goals are reached; 1 an error; 2 an unknown name or option",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all by default")
    parser.add_argument("--rounds", type=int, help="how many times the candidates take turns")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write goals and tables, with machine, versions and date"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")

    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = ALLOCATOR
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])

    import torch

    from benchmarks.harness import as_json, console, print_goals

    torch.set_num_threads(1)
    console.print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread, thread CPU time, "
        f"GLIBC_TUNABLES={os.environ.get('GLIBC_TUNABLES', '–')}"
    )
    options = {} if arguments.rounds is None else {"rounds": arguments.rounds}
    goals = []
    names = arguments.names or NAMES
    for name in names:
        console.rule(name)
        goals += importlib.import_module(f"benchmarks.{name}").run(**options)
    print_goals(goals)
    if arguments.json is not None:
        arguments.json.write_text(as_json(goals, names) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
