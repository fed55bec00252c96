"""Work in processes that may crash or hang: if a process does, only its current item is lost."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedString
from typing import Any, cast

import torch

# The size of the buffer for what a worker says about its item.
LENGTH = 1024
# Seconds that a worker may take to import torch, in addition to the time limit of its first item.
START = 180.0

# The answer for an item. The work is also given a function, by which it says what it does.
Work = Callable[[Any, Callable[[str], None]], Any]


@dataclass(frozen=True)
class Lost:
    """An item whose process died or hung: why, and what the process said last."""

    item: Any
    why: str
    said: str


def in_processes(
    work: Work,
    items: Sequence[Any],
    workers: int,
    timeout: float,
    most: int,
    modules: Sequence[str] = (),
    until: float = float("inf"),
) -> Iterator[Any]:
    """The answers for all items as they arrive, each its own or a :class:`Lost`.

    timeout  seconds for an item, from the first time that the work says something
    most     a process is replaced after so many items
    modules  what a process imports first
    until    the time (of time.monotonic) after which nothing is waited for
    """
    waiting = list(reversed(items))
    pool: list[_Worker] = []
    try:
        while (waiting or pool) and time.monotonic() < until:
            while waiting and len(pool) < workers:
                pool.append(_Worker(work, timeout, modules))
                pool[-1].give(waiting.pop())
            multiprocessing.connection.wait([worker.connection for worker in pool], timeout=1.0)
            for worker in list(pool):
                if not worker.has_answered():
                    continue
                yield worker.answer
                if waiting and worker.served < most and worker.process.is_alive():
                    worker.give(waiting.pop())
                else:
                    pool.remove(worker)
                    worker.stop()
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """A process that works on one item after another."""

    def __init__(self, work: Work, timeout: float, modules: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, worker_end = context.Pipe()
        self.said = cast(SynchronizedString, context.Array("c", LENGTH))
        self.process = context.Process(target=_serve, args=(worker_end, self.said, work, modules), daemon=True)
        self.process.start()
        worker_end.close()
        self.timeout = timeout
        self.item: Any = None
        self.answer: Any = None
        self.deadline = float("inf")
        self.started = False
        self.served = 0

    def give(self, item: Any) -> None:
        self.item = item
        self.served += 1
        self.said.value = b""
        self.connection.send(item)
        self.deadline = time.monotonic() + self.timeout + START
        self.started = False

    def has_answered(self) -> bool:
        """Whether `answer` is now the one for its item: Lost after a crash or a timeout."""
        try:
            if self.connection.poll():
                self.answer = self.connection.recv()
            elif self._is_overdue():
                self.answer = self._lost(f"not finished after {self.timeout:g} s")
            else:
                return False
        except (EOFError, OSError):
            self.process.join()
            self.answer = self._lost(f"the process died with exit code {self.process.exitcode}")
        return True

    def _is_overdue(self) -> bool:
        if not self.started and self.said.value:
            self.started = True
            self.deadline = time.monotonic() + self.timeout
        return time.monotonic() > self.deadline

    def _lost(self, why: str) -> Lost:
        return Lost(self.item, why, self.said.value.decode())

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(
    connection: multiprocessing.connection.Connection[Any, Any],
    said: SynchronizedString,
    work: Work,
    modules: Sequence[str],
) -> None:
    """The main loop of a worker."""
    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)

    def say(line: str) -> None:
        said.value = line.encode()[: LENGTH - 1]

    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(work(item, say))
