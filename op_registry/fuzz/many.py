"""Many random programs under a law, in this process or in worker processes that may crash or hang."""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from op_registry.conformance.subjects import find_subject
from op_registry.fuzz.generating import Choices, program_from
from op_registry.fuzz.laws import LAWS, telling_garbage
from op_registry.fuzz.padding import program_of_samples
from op_registry.fuzz.programs import Program
from op_registry.fuzz.shrinking import shrunk
from op_registry.fuzz.snippets import law_lines, snippet
from op_registry.workers import Lost, in_processes

# Compiled regions are dropped after this many programs, and a worker replaced after this many.
MOST_COMPILED = 20
MOST_PROGRAMS = 2_000


@dataclass(frozen=True)
class Settings:
    """The settings of a run: a law, a subject, the most steps of a program, and `modules` that register rules."""

    law: str = "P3"
    subject: str | None = None
    most_steps: int = 12
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The outcome for a seed, and the peak memory of the process that ran it, in MiB."""

    seed: int
    finding: Finding | None
    peak: int


@dataclass(frozen=True)
class Finding:
    """A program that breaks the law: its seed, the complaint, and the smallest program found that breaks it too."""

    seed: int
    complaint: str
    program: Program | None = None
    code: str = ""

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.complaint}\n{self.code}"


def check_seed(seed: int, settings: Settings) -> Finding | None:
    """Generate the program of a seed and test the law on it; if it breaks the law, make it smaller."""
    subject = find_subject(settings.subject)
    law = LAWS[settings.law]
    if settings.law == "P9":
        program = program_of_samples(seed, settings.most_steps)
    else:
        program = program_from(seed, Choices.for_law(settings.law, subject, settings.most_steps))
    complaint = law(program, subject)
    for mode in (subject, *subject.modes().values()):
        mode.densified()  # nobody reads the log, which would grow
    if complaint is None:
        return None
    smallest = shrunk(program, lambda smaller: law(smaller, subject) is not None)
    complaint = law(smallest, subject) or complaint
    garbage = telling_garbage(smallest, subject) if settings.law == "P3" else None
    code = law_lines(settings.law, complaint, subject) + snippet(smallest, settings.subject, garbage)
    return Finding(seed, complaint, smallest, code)


def peak_memory() -> int:
    """The largest resident memory that this process has had, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 2**20 if sys.platform == "darwin" else peak // 2**10


def in_this_process(seeds: Sequence[int], settings: Settings) -> Iterator[Answer]:
    """Each seed with its finding, if any."""
    for number, seed in enumerate(seeds, 1):
        yield Answer(seed, check_seed(seed, settings), peak_memory())
        if settings.law == "P7" and number % MOST_COMPILED == 0:
            torch.compiler.reset()


def in_workers(seeds: Sequence[int], settings: Settings, workers: int, timeout: float) -> Iterator[Answer]:
    """The same in worker processes, as they finish. A program that kills its process, or hangs, is a finding."""
    work = functools.partial(_answer, settings)
    for answer in in_processes(work, seeds, workers, timeout, MOST_PROGRAMS, settings.modules):
        yield Answer(answer.item, Finding(answer.item, answer.why), 0) if isinstance(answer, Lost) else answer


def _answer(settings: Settings, seed: int, say: Callable[[str], None]) -> Answer:
    find_subject(settings.subject)
    say(f"seed {seed}")  # its time begins now that the subject is imported
    return Answer(seed, check_seed(seed, settings), peak_memory())
