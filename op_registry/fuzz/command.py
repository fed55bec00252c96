"""``python -m op_registry fuzz``: random programs under a law."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence

import torch

from op_registry.conformance.part import at_least_one
from op_registry.fuzz.generating import FEWEST_STEPS
from op_registry.fuzz.laws import LAWS
from op_registry.fuzz.many import Finding, Settings, in_this_process, in_workers
from op_registry.fuzz.padding import IN_A_GRAPH, Tally
from op_registry.progress import progress

# A line of progress is printed each time that so many programs have run.
PROGRAMS_PER_LINE = 1000
# Lines of padded programs that are refused more often than this are listed.
OFTEN_REFUSED = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--law", choices=tuple(LAWS), default="P3", help="the law (default: P3)")
    parser.add_argument("--n", type=at_least_one, default=200, help="number of programs")
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the first program; the others have the numbers that follow"
    )
    parser.add_argument("--most-ops", type=int, default=12, help=f"the longest program (at least {FEWEST_STEPS} steps)")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compare torch.compile(backend='aot_eager') with eager: --law P7, or every program of P9 instead of a few",
    )
    parser.add_argument("--subject", help="the masked tensor to test: an entry point, or module:attribute")
    parser.add_argument("--import", dest="modules", action="append", default=[], help="a module that registers rules")
    parser.add_argument(
        "--workers", type=int, default=0, help="number of processes, which may crash; 0 runs in this one"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each program, in workers")


def run(options: argparse.Namespace) -> int:
    """Run the programs, print each violation as a snippet, and give the exit status: 1 if there was one."""
    started = time.monotonic()
    settings = Settings(
        law="P7" if options.compiled and options.law != "P9" else options.law,
        subject=options.subject,
        most_steps=options.most_ops,
        modules=tuple(options.modules),
        compiled=options.compiled,
    )
    seeds = range(options.seed, options.seed + options.n)
    say = _quiet if options.json else functools.partial(print, flush=True)
    say(f"{settings.law}: seeds {options.seed} to {options.seed + options.n - 1}")
    runs = (
        in_workers(seeds, settings, options.workers, options.timeout)
        if options.workers
        else in_this_process(seeds, settings)
    )
    findings: list[Finding] = []
    memory, tally = Memory(), Tally()
    for number, answer in enumerate(progress(runs, options.n, "program"), 1):
        memory.add(answer.peak)
        tally.update(answer.tally)
        if answer.finding is not None:
            findings.append(answer.finding)
            say(answer.finding)
            say(f"# the whole program: {repeating(answer.finding, settings)}\n")
        if number % PROGRAMS_PER_LINE == 0:
            say(f"{number} programs, {len(findings)} break {settings.law}, {memory}")
    seconds = time.monotonic() - started
    for line in refusals(tally):
        say(line)
    say(f"{options.n} programs, {len(findings)} break {settings.law} ({seconds:.0f} s), {memory}")
    if options.json:
        print(as_json(findings, options, settings, memory, tally, seconds))
    return 1 if findings else 0


def _quiet(*_: object) -> None:
    """Discard the lines that would be printed."""


def repeating(finding: Finding, settings: Settings) -> str:
    """The command that runs the program of a finding again."""
    in_graphs = " --compiled" if settings.law == "P9" and IN_A_GRAPH in finding.complaint else ""
    return f"python -m op_registry fuzz --law {settings.law} --n 1 --seed {finding.seed}{in_graphs}"


def refusals(tally: Tally) -> list[str]:
    """How many steps were refused, and the kinds of lines of which most were, however often they were drawn (P9)."""
    steps = {kind: tally[kind, "refused"] + tally[kind, "compared"] for kind, _ in tally}
    if not steps:
        return []
    often = sorted(((tally[kind, "refused"] / n, n, kind) for kind, n in steps.items() if n), reverse=True)
    lines = [f"  {tally[kind, 'refused']} of {n}: {kind}" for rate, n, kind in often if rate > OFTEN_REFUSED]
    refused = sum(n for (_, what), n in tally.items() if what == "refused")
    in_graphs = sum(n for (_, what), n in tally.items() if what not in ("refused", "compared"))
    return [
        f"{refused} of {sum(steps.values())} steps refused, and {in_graphs} programs in a graph",
        *([f"lines refused in more than {OFTEN_REFUSED:.0%} of their calls:"] if lines else []),
        *lines,
    ]


def as_json(
    findings: Sequence[Finding],
    options: argparse.Namespace,
    settings: Settings,
    memory: Memory,
    tally: Tally,
    seconds: float,
) -> str:
    """The results as values."""
    broken = [
        {"seed": each.seed, "complaint": each.complaint, "code": each.code, "repeat": repeating(each, settings)}
        for each in findings
    ]
    fields = {
        "command": "fuzz", "torch": torch.__version__, "law": settings.law, "first_seed": options.seed,
        "programs": options.n, "seconds": round(seconds, 3), "peak_memory_MiB": memory.most, "broken": broken,
        "lines": {
            kind: {what: n for (of, what), n in sorted(tally.items()) if of == kind} for kind, _ in sorted(tally)
        },
    }  # fmt: skip
    return json.dumps(fields, indent=1, ensure_ascii=False)


class Memory:
    """The peak memory of the processes of a run: of the first programs, and of all."""

    def __init__(self) -> None:
        self.programs = self.first = self.most = 0

    def add(self, peak: int) -> None:
        """Record the peak memory of a program's process, in MiB."""
        self.programs += 1
        self.most = max(self.most, peak)
        if self.programs <= PROGRAMS_PER_LINE:
            self.first = self.most

    def __str__(self) -> str:
        return f"peak memory {self.first} MiB in the first {PROGRAMS_PER_LINE}, {self.most} MiB in all"
