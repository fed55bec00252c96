"""Many random programs under a law, in this process or in worker processes that may crash or hang."""

from __future__ import annotations

import functools
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from op_registry.conformance.subject import Subject
from op_registry.conformance.subjects import find_subject
from op_registry.fuzz.generating import Choices, program_from
from op_registry.fuzz.laws import LAWS, Law, telling_garbage
from op_registry.fuzz.padded_programs import can_be_drawn, program_of_samples
from op_registry.fuzz.padding import IN_A_GRAPH, OWN, Tally, batch_is_its_samples
from op_registry.fuzz.programs import Program
from op_registry.fuzz.shrinking import shrunk
from op_registry.fuzz.snippets import law_lines, snippet
from op_registry.workers import Lost, in_processes

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
    garbage = telling_garbage(smallest, subject) if settings.law == "P3" else None
    own, in_a_graph = complaint.startswith(OWN), IN_A_GRAPH in complaint
    code = law_lines(settings.law, complaint, subject)
    code += snippet(smallest, settings.subject, garbage, own, in_a_graph)
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
