"""What plain tensors, and the import, pay for the library.

Two processes live side by side, one with the library imported and one without, and take turns on one core at the same
plain operators. Import times are those of fresh processes, again in turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.harness import Goal, duration, print_table, progress, timing

WORKER = """
import os, sys, time, torch
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(1)
if sys.argv[1] == "with":
    import masked_dispatch
x, y = torch.randn(64, 64), torch.randn(64, 64)
w = torch.randn(64, 64, requires_grad=True)
calls = {
    "x + y": lambda: x + y,
    "exp": x.exp,
    "x.sum()": x.sum,
    "x @ w, backward": lambda: (x @ w).sum().backward(),
}
for line in sys.stdin:
    name, times = line.rstrip("\\n").split("|")
    call = calls[name]
    for _ in range(5):
        call()
    start = time.thread_time()
    for _ in range(int(times)):
        call()
    print((time.thread_time() - start) / int(times), flush=True)
"""
CALLS = {"x + y": 500, "exp": 300, "x.sum()": 500, "x @ w, backward": 20}
IMPORT = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
IMPORTS = {"without": "import torch", "with": "import torch; import masked_dispatch"}


class Worker:
    """A process that runs plain operators when asked."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, name: str, times: int) -> float:
        """Thread CPU seconds of one call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{name}|{times}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the worker process has ended; its error is above")
        return float(answer)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def import_seconds(kind: str, bytecode: str) -> float:
    """CPU seconds that the imports take in a fresh process, which finds (or leaves) bytecode in a folder."""
    code = IMPORT.format(IMPORTS[kind])
    env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    return float(done.stdout)


def plain_operators(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each plain call, round by round, with the library and without."""
    measured: dict[str, dict[str, list[float]]] = {name: {"with": [], "without": []} for name in CALLS}
    workers = {kind: Worker(kind) for kind in ("with", "without")}
    try:
        for turn in range(rounds):
            order = ("with", "without") if turn % 2 else ("without", "with")
            for name, times in CALLS.items():
                for kind in order:
                    measured[name][kind].append(workers[kind].seconds(name, times))
    finally:
        for worker in workers.values():
            worker.stop()
    return measured


def run(rounds: int = 301, imports: int = 5) -> list[Goal]:
    goals = []
    rows = []
    for name, kinds in plain_operators(rounds).items():
        with_library = timing(kinds["with"], kinds["without"])
        without = statistics.median(kinds["without"])
        ratio = f"{with_library.ratio:.3f} [{with_library.low:.3f}–{with_library.high:.3f}]"
        rows.append([name, duration(without), duration(with_library.seconds), ratio])
        goals.append(Goal(f"plain {name}: with ÷ without", with_library.ratio, 1.05))
    print_table("plain 64×64 operators", ("", "without the library", "with it", "ratio"), rows)

    seconds: dict[str, list[float]] = {kind: [] for kind in IMPORTS}
    with tempfile.TemporaryDirectory() as bytecode:
        # As every import but the first on a machine: what is installed has been compiled.
        import_seconds("with", bytecode)
        for _ in progress([str(i) for i in range(imports)], "imports"):
            for kind in IMPORTS:
                seconds[kind].append(import_seconds(kind, bytecode))
    extra = statistics.median(w - o for w, o in zip(seconds["with"], seconds["without"], strict=True))
    medians = {kind: f"{statistics.median(s):.2f} s" for kind, s in seconds.items()}
    print_table(
        "import, CPU time", ("torch alone", "torch and the library", "more"), [[*medians.values(), f"{extra:.2f} s"]]
    )
    return [*goals, Goal("import: seconds more than torch alone", extra, 0.5)]
