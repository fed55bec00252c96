"""``python -m op_registry fuzz``: many random programs under a law, and each violation as a snippet.

The programs run in this process, or in worker processes that may crash or hang. One that breaks the law is made
smaller, and printed as Python code that runs by itself.
"""

from __future__ import annotations

import argparse
import functools
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from op_registry.conformance.samples import at_least_one
from op_registry.conformance.subject import Subject, find_subject
from op_registry.fuzz.generating import FEWEST_STEPS, Choices, program_from
from op_registry.fuzz.laws import LAWS, Law, telling_garbage
from op_registry.fuzz.padded_programs import can_be_drawn, program_of_samples
from op_registry.fuzz.padding import IN_A_GRAPH, OWN, Tally, batch_is_its_samples
from op_registry.fuzz.programs import Program, Source, Step, results_of
from op_registry.progress import progress
from op_registry.workers import Lost, in_processes

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


def run(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Run the programs, and print each violation as a snippet; what came of all, in words and as values."""
    started = time.monotonic()
    settings = Settings(
        law="P7" if options.compiled and options.law != "P9" else options.law,
        subject=options.subject,
        most_steps=options.most_ops,
        modules=tuple(options.modules),
        compiled=options.compiled,
    )
    seeds = range(options.seed, options.seed + options.n)
    say: Callable[..., None] = (lambda *_: None) if options.json else functools.partial(print, flush=True)
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
    summary = f"{options.n} programs, {len(findings)} break {settings.law} ({seconds:.0f} s), {memory}"
    broken = [
        {"seed": each.seed, "complaint": each.complaint, "code": each.code, "repeat": repeating(each, settings)}
        for each in findings
    ]
    lines = {kind: {what: n for (of, what), n in sorted(tally.items()) if of == kind} for kind, _ in sorted(tally)}
    return "\n".join([*refusals(tally), summary]), {
        "law": settings.law, "first_seed": options.seed, "programs": options.n, "seconds": round(seconds, 3),
        "peak_memory_MiB": memory.most, "broken": broken, "lines": lines,
    }  # fmt: skip


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


# -------------------------------------------------------------------------------------------------------- many programs

# Compiled regions are dropped after this many programs, and a worker replaced after this many.
MOST_COMPILED = 20
MOST_PROGRAMS = 2_000
# Under P9, one program in so many is run in a graph, too.
COMPILED_ONE_IN = 20


@dataclass(frozen=True)
class Settings:
    """The settings of a run: a law, a subject, the most steps of a program, and `modules` that register rules.

    compiled  whether every program of padded batches is run in a graph too (P9), not one in COMPILED_ONE_IN
    """

    law: str = "P3"
    subject: str | None = None
    most_steps: int = 12
    modules: tuple[str, ...] = ()
    compiled: bool = False


@dataclass(frozen=True)
class Answer:
    """The outcome for a seed, the peak memory of the process that ran it, in MiB, and what became of its lines (P9)."""

    seed: int
    finding: Finding | None
    peak: int
    tally: Tally = field(default_factory=Counter)


@dataclass(frozen=True)
class Finding:
    """A program that breaks the law: its seed, the complaint, and the smallest program found that breaks it too."""

    seed: int
    complaint: str
    program: Program | None = None
    code: str = ""

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.complaint}\n{self.code}"


def check_seed(seed: int, settings: Settings, tally: Tally | None = None) -> Finding | None:
    """Generate the program of a seed and test the law on it; if it breaks the law, make it smaller."""
    subject = find_subject(settings.subject)
    if settings.law == "P9":
        program = program_of_samples(seed, settings.most_steps)
        law, complaint = _padded(program, subject, settings, tally)
    else:
        law = LAWS[settings.law]
        program = program_from(seed, Choices.for_law(settings.law, subject, settings.most_steps))
        complaint = law(program, subject)
    for mode in (subject, *subject.modes().values()):
        mode.densified()  # nobody reads the log, which would grow
    if complaint is None:
        return None
    smallest = shrunk(program, lambda smaller: law(smaller, subject) is not None)
    complaint = law(smallest, subject) or complaint
    told = telling_garbage(smallest, subject) if settings.law == "P3" else None
    garbage = None if told is None else told[0]
    own, in_a_graph = complaint.startswith(OWN), IN_A_GRAPH in complaint
    code = f"# {settings.law} broken on {subject.name}: {complaint}\n" + snippet(
        smallest, settings.subject, garbage, own, in_a_graph
    )
    return Finding(seed, complaint, smallest, code)


def _padded(program: Program, subject: Subject, settings: Settings, tally: Tally | None) -> tuple[Law, str | None]:
    """What P9 says of a program, and the law that says it of smaller ones: a graph is asked only if it has to be."""
    compiled = settings.compiled or program.seed % COMPILED_ONE_IN == 0
    complaint = batch_is_its_samples(program, subject, compiled, tally)
    if compiled:
        torch.compiler.reset()
    in_a_graph = complaint is not None and IN_A_GRAPH in complaint

    def law(smaller: Program, subject: Subject) -> str | None:
        return batch_is_its_samples(smaller, subject, in_a_graph) if can_be_drawn(smaller) else None

    return law, complaint


def peak_memory() -> int:
    """The largest resident memory that this process has had, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 2**20 if sys.platform == "darwin" else peak // 2**10


def in_this_process(seeds: Sequence[int], settings: Settings) -> Iterator[Answer]:
    """Each seed with its finding, if any."""
    for number, seed in enumerate(seeds, 1):
        yield _answer(settings, seed)
        if settings.law == "P7" and number % MOST_COMPILED == 0:
            torch.compiler.reset()


def in_workers(seeds: Sequence[int], settings: Settings, workers: int, timeout: float) -> Iterator[Answer]:
    """The same in worker processes, as they finish. A program that kills its process, or hangs, is a finding."""
    work = functools.partial(_answer, settings)
    for answer in in_processes(work, seeds, workers, timeout, MOST_PROGRAMS, settings.modules):
        yield Answer(answer.item, Finding(answer.item, answer.why), 0) if isinstance(answer, Lost) else answer


def _answer(settings: Settings, seed: int, say: Callable[[str], None] = lambda text: None) -> Answer:
    find_subject(settings.subject)
    say(f"seed {seed}")  # its time begins now that the subject is imported
    tally: Tally = Counter()
    finding = check_seed(seed, settings, tally)
    return Answer(seed, finding, peak_memory(), tally)


# ---------------------------------------------------------------- a smaller program that breaks the law in the same way

# The most programs that are tried, and seconds that they may take; each costs a few runs.
MOST_TRIALS = 400
MOST_SECONDS = 60.0
SMALLEST = 2  # the size that dimensions are shrunk to
# Kinds of masks in the order in which they are tried in place of another one.
PLAINER_MASKS = ("plain", "unstored", "random")

StillBroken = Callable[[Program], bool]


def shrunk(program: Program, still_broken: StillBroken) -> Program:
    """The smallest program found for which `still_broken` holds, one change after another."""
    trials, deadline = 0, time.monotonic() + MOST_SECONDS
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(program):
            trials += 1
            if still_broken(smaller):
                program, progress = smaller, True
                break
            if trials >= MOST_TRIALS or time.monotonic() > deadline:
                return program
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one simplification each, the largest change first."""
    yield from _halves(program)
    yield from _without_a_step(program)
    yield from _with_a_step_bypassed(program)
    yield from _without_unused_sources(program)
    for source in program.sources:
        for plainer in _plainer(source):
            yield replace(program, sources=tuple(plainer if s is source else s for s in program.sources))
    yield from _with_smaller_shapes(program)


def _halves(program: Program) -> Iterator[Program]:
    for stop in (len(program.steps) // 2, len(program.steps) * 3 // 4):
        if 0 < stop < len(program.steps):
            yield replace(program, steps=program.steps[:stop])


def _without_a_step(program: Program) -> Iterator[Program]:
    """The program without one step, and without the steps that need its value."""
    for number in reversed(range(len(program.steps))):
        kept: list[Step] = []
        missing: set[str] = set()
        for position, step in enumerate(program.steps):
            if position == number or missing & set(step.operands):
                missing.add(step.name)
            else:
                kept.append(step)
        if kept:
            yield replace(program, steps=tuple(kept))


def _with_a_step_bypassed(program: Program) -> Iterator[Program]:
    """The program without one step, with the step's first operand in place of its value."""
    for number, step in enumerate(program.steps):
        if step.writes or len(program.steps) == 1:
            continue
        later = [
            replace(s, operands=tuple(step.operands[0] if name == step.name else name for name in s.operands))
            for s in program.steps[number + 1 :]
        ]
        yield replace(program, steps=(*program.steps[:number], *later))


def _without_unused_sources(program: Program) -> Iterator[Program]:
    used = {name for step in program.steps for name in step.operands}
    for source in program.sources:
        if source.name not in used and len(program.sources) > 1:
            # A source that shares the removed source's mask gets its own mask of the same kind.
            kept = [
                replace(s, under=None, mask=source.mask) if s.under == source.name else s
                for s in program.sources
                if s is not source
            ]
            yield replace(program, sources=tuple(kept))


def _plainer(source: Source) -> Iterator[Source]:
    if source.requires_grad:
        yield replace(source, requires_grad=False)
    if source.storage != "dense":
        yield replace(source, storage="dense")
    if source.under is not None:
        yield replace(source, under=None)
    else:
        ranks = (*PLAINER_MASKS, source.mask)
        for mask in ranks[: ranks.index(source.mask)]:
            yield replace(source, mask=mask, storage="dense" if mask == "plain" else source.storage)
    if source.dtype in ("float64", "float16"):
        yield replace(source, dtype="float32")


def _with_smaller_shapes(program: Program) -> Iterator[Program]:
    """The program with one size replaced by a smaller one, wherever it occurs."""
    sizes = {size for source in program.sources for size in source.shape if size > SMALLEST}
    for size in sorted(sizes, reverse=True):
        for smaller in dict.fromkeys((SMALLEST, size // 2)):
            sources = (replace(s, shape=tuple(smaller if n == size else n for n in s.shape)) for s in program.sources)
            yield replace(program, sources=tuple(sources))


# -------------------------------------------------------------------------------- a program as code that runs by itself

HEAD = """import torch
import torch.nn.functional as F
from torch import inf, nan
from op_registry.conformance.subject import find_subject
from op_registry.fuzz import idioms, padding, programs
from op_registry.fuzz.programs import Source

subject = find_subject({subject})
"""


def snippet(
    program: Program, subject: str | None, garbage: int | None, own: bool = False, compiled: bool = False
) -> str:
    """Python code that makes the tensors, garbage included, runs the steps and prints every value.

    subject   the name by which to find it
    garbage   None: the data under the masks stays as drawn
    own       whether the extents of padded batches are tensors of their own
    compiled  whether a program on padded batches is run in a graph
    """
    names = ", ".join(source.name for source in program.sources)
    lines = [HEAD.format(subject=repr(subject) if subject else "")]
    lines += [f"{source.name} = {source!r}" for source in program.sources]
    lines.append(f"given = [{names}]")
    if any(source.axes for source in program.sources):
        return "\n".join([*lines, *_of_samples(program, names, own, compiled)]) + "\n"
    lines.append(f"{names}, = programs.wrapped(given, subject, {garbage}).values()")
    for step in program.steps:
        if step.random:
            lines.append(f"torch.manual_seed({program.seed})")
        lines.append(step.line())
    lines += [f"print({name!r}, {name}, sep='\\n')" for name in results_of(program)]
    return "\n".join(lines) + "\n"


def _of_samples(program: Program, names: str, own: bool, compiled: bool) -> list[str]:
    """The program as a function; it prints the values of the batch, with their extents, and those of each sample."""
    values = ", ".join(f"{step.name!r}: {step.name}" for step in program.steps)
    function = 'torch.compile(program, fullgraph=True, backend="aot_eager")' if compiled else "program"
    return [
        *("", "", f"def program({names}):", *(f"    {step.line()}" for step in program.steps)),
        *(f"    return {{{values}}}", "", ""),
        f"batch = {function}(*(padding.batch_of(s, {program.seed}, subject, own={own}) for s in given))",
        "for name, value in batch.items():",
        "    print(name, value, 'there:', subject.extent(value), sep='\\n')",
        f"for row in range({next(s.shape[0] for s in program.sources if s.axes)}):",
        "    try:",
        f"        print('sample', row, program(*(padding.sample_of(s, row, {program.seed}, subject) for s in given)))",
        "    except (RuntimeError, IndexError, ValueError) as error:",
        "        print('sample', row, 'raises', error)",
    ]
