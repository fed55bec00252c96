"""A forked process has the library's locks for itself, whoever held them in its parent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import masked_dispatch as md
from masked_dispatch.dispatch import ladder
from masked_dispatch.dispatch.kernel_table import kernel_table
from masked_dispatch.seeing import watching
from masked_dispatch.tensor import mask_sharing
from masked_dispatch.tensor.mask_sharing import family_of
from masked_dispatch.tensor.memory import lock_of
from repository import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform forks no processes")


def dense() -> Any:
    return md.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


def sparse() -> Any:
    return dense().to_sparse()


def write(x: Any) -> None:
    x[:2] = 3.0
    x.add_(1)
    assert float(x[0]) == 4.0


def viewed() -> Any:
    x = dense()
    x[1:].fill_(2.0)
    return x


# What the tensor is, the lock that another thread holds, and what the child does.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "of a dense tensor": (dense, lock_of, write),
    "of a plain tensor": (lambda: torch.zeros(3), lock_of, lambda x: x.add_(dense())),
    "of a sparse tensor": (sparse, lock_of, write),
    "of a family": (viewed, lambda x: family_of(x).lock.here, write),
    "of the founding of families": (dense, lambda x: mask_sharing._founding.here, write),
    "of the kernels": (dense, lambda x: kernel_table._lock.here, lambda x: torch.special.bessel_j0(x)),
    "of the rules": (dense, lambda x: ladder._changing.here, lambda x: ladder._changed(torch.ops.aten.exp.default)),
    "of traces": (dense, lambda x: watching._lock.here, lambda x: md.trace().__enter__()),
}


def outcome_in_a_fork(work: Callable[[], object]) -> str:
    """How a forked process ends that does the work, and gives up after some seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    return "waits" if os.WIFSIGNALED(status) else ("done" if os.WEXITSTATUS(status) == 0 else "raises")


@pytest.mark.parametrize("held", HELD)
def test_what_another_thread_held_when_a_process_was_forked_is_free(held: str) -> None:
    make, lock, work = HELD[held]
    x = make()
    holds, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock(x):
            holds.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        assert outcome_in_a_fork(lambda: work(x)) == "done"
    finally:
        release.set()
        thread.join()


def test_what_the_forking_thread_holds_is_left_in_both_processes() -> None:
    x = dense()

    def work() -> None:
        with lock_of(x):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                write(x)
            else:
                assert os.waitpid(child, 0)[1] == 0
        write(x)

    assert outcome_in_a_fork(work) == "done"


def test_no_module_makes_a_lock_of_another_kind() -> None:
    """Of threading, which is inherited as it is. What waits for messages of other ranks has no use after a fork."""
    makes = re.compile(r"threading\.(R?Lock|Condition|Semaphore)\(")
    found = [
        path.relative_to(ROOT).as_posix()
        for package in ("masked_dispatch", "op_registry")
        for path in (ROOT / package).rglob("*.py")
        if makes.search(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == ["masked_dispatch/distributed/calls.py", "masked_dispatch/process.py"]
