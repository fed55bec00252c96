"""Locks that a forked process has for itself: of the threads of its parent that may hold one, none is there."""

from __future__ import annotations

import contextlib
import os
import threading


class _Process:
    """The process, as an object that a forked one replaces."""

    this = object()
    renewing = threading.Lock()

    @classmethod
    def begin(cls) -> None:
        cls.this, cls.renewing = object(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.begin)


class Lock:
    """A reentrant lock, which nobody holds when a process has been forked."""

    __slots__ = ("_lock", "_process")

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), _Process.this

    def __enter__(self) -> None:
        if self._process is not _Process.this:
            with _Process.renewing:
                if self._process is not _Process.this:
                    # In this order: who sees the process sees the new lock.
                    self._lock = threading.RLock()
                    self._process = _Process.this
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it was entered before the fork, and has been renewed since
            self._lock.release()
