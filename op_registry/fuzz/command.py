"""``python -m op_registry fuzz``: random programs under a law."""

from __future__ import annotations

import argparse
import time

from op_registry.fuzz.generating import FEWEST_STEPS
from op_registry.fuzz.laws import LAWS
from op_registry.fuzz.many import Settings, in_this_process, in_workers

# A line of progress is printed each time that so many programs have run.
PROGRAMS_PER_LINE = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--law", choices=tuple(LAWS), default="P3", help="the law (default: P3)")
    parser.add_argument("--n", type=int, default=200, help="number of programs")
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the first program; the others have the numbers that follow"
    )
    parser.add_argument("--most-ops", type=int, default=12, help=f"the longest program (at least {FEWEST_STEPS} steps)")
    parser.add_argument(
        "--compiled", action="store_true", help="compare torch.compile(backend='aot_eager') with eager: --law P7"
    )
    parser.add_argument("--subject", help="the masked tensor to test: an entry point, or module:attribute")
    parser.add_argument("--import", dest="modules", action="append", default=[], help="a module that registers rules")
    parser.add_argument(
        "--workers", type=int, default=0, help="number of processes, which may crash; 0 runs in this one"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each program, in workers")


def run(options: argparse.Namespace) -> int:
    """Run the programs, print each violation as a snippet, and give the exit status: 1 if there was one."""
    settings = Settings(
        law="P7" if options.compiled else options.law,
        subject=options.subject,
        most_steps=options.most_ops,
        modules=tuple(options.modules),
    )
    seeds = range(options.seed, options.seed + options.n)
    started = time.monotonic()
    print(f"{settings.law}: seeds {options.seed} to {options.seed + options.n - 1}", flush=True)
    runs = (
        in_workers(seeds, settings, options.workers, options.timeout)
        if options.workers
        else in_this_process(seeds, settings)
    )
    broken = 0
    memory = Memory()
    for number, answer in enumerate(runs, 1):
        memory.add(answer.peak)
        if answer.finding is not None:
            broken += 1
            print(answer.finding, flush=True)
            print(f"# the whole program: python -m op_registry fuzz --law {settings.law} --n 1 --seed {answer.seed}\n")
        if number % PROGRAMS_PER_LINE == 0:
            print(f"{number} programs, {broken} break {settings.law}, {memory}", flush=True)
    print(f"{options.n} programs, {broken} break {settings.law} ({time.monotonic() - started:.0f} s), {memory}")
    return 1 if broken else 0


class Memory:
    """The peak memory of the processes of a run: of the first programs, and of all."""

    def __init__(self) -> None:
        self.programs = self.first = self.most = 0

    def add(self, peak: int) -> None:
        """Take in the peak memory of the process of a program, in MiB."""
        self.programs += 1
        self.most = max(self.most, peak)
        if self.programs <= PROGRAMS_PER_LINE:
            self.first = self.most

    def __str__(self) -> str:
        return f"peak memory {self.first} MiB in the first {PROGRAMS_PER_LINE}, {self.most} MiB in all"
