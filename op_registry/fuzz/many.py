"""Many random programs under a law, in this process or in worker processes that may crash or hang."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from op_registry.conformance.subjects import find_subject
from op_registry.fuzz.generating import Choices, program_from
from op_registry.fuzz.laws import LAWS, telling_garbage
from op_registry.fuzz.padding import program_of_samples
from op_registry.fuzz.programs import Program
from op_registry.fuzz.shrinking import shrunk
from op_registry.fuzz.snippets import law_lines, snippet

# Seconds that a worker may take to start; it then says READY, and its first program's time begins.
START = 180.0
READY = "ready"
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
    waiting = list(reversed(seeds))
    pool = [_Worker(settings, timeout) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(worker.seed is not None for worker in pool):
            for worker in pool:
                if worker.seed is None and waiting:
                    worker.give(waiting.pop())
            multiprocessing.connection.wait(
                [worker.connection for worker in pool if worker.seed is not None], timeout=1.0
            )
            for position, worker in enumerate(pool):
                answer = worker.answer()
                if answer is None:
                    continue
                yield answer
                if worker.lost or worker.served >= MOST_PROGRAMS:
                    worker.stop()
                    pool[position] = _Worker(settings, timeout)
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """A process that checks one seed after another."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        self.process = context.Process(target=_work, args=(worker_end, settings), daemon=True)
        self.process.start()
        worker_end.close()
        self.timeout = timeout
        self.seed: int | None = None
        self.deadline = float("inf")
        self.served = 0
        self.lost = False

    def give(self, seed: int) -> None:
        self.seed = seed
        self.deadline = time.monotonic() + (self.timeout if self.served else START)
        self.served += 1
        self.connection.send(seed)

    def answer(self) -> Answer | None:
        """The answer for its seed, once there is one; a crash or a timeout is a finding, and the worker is lost."""
        if self.seed is None:
            return None
        seed = self.seed
        try:
            if self.connection.poll():
                found = self.connection.recv()
                if found == READY:
                    self.deadline = time.monotonic() + self.timeout
                    return None
                answer: Answer = found
            elif time.monotonic() <= self.deadline:
                return None
            else:
                self.lost, answer = True, Answer(seed, Finding(seed, f"not finished after {self.timeout:g} s"), 0)
        except (EOFError, OSError):
            self.process.join()
            died = Finding(seed, f"the process died with exit code {self.process.exitcode}")
            self.lost, answer = True, Answer(seed, died, 0)
        self.seed = None
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: multiprocessing.connection.Connection[Any, Any], settings: Settings) -> None:
    """The main loop of a worker."""
    torch.set_num_threads(1)
    for module in settings.modules:
        importlib.import_module(module)
    find_subject(settings.subject)
    connection.send(READY)
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        for answer in in_this_process([seed], settings):
            connection.send(answer)
