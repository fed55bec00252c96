"""Locks that a forked process has for itself: of the threads of its parent that may hold one, none is there."""

from __future__ import annotations

import os
import threading
from typing import Any


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
    """A reentrant lock, which nobody holds when a process has been forked: ``with lock.here:``."""

    __slots__ = ("_lock", "_process")

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), _Process.this

    @property
    def here(self) -> Any:
        """Python's own lock, which is entered and left in C: no exception of a signal's handler leaves it held."""
        if self._process is not _Process.this:
            with _Process.renewing:
                if self._process is not _Process.this:
                    # In this order: who sees the process sees the new lock.
                    self._lock = threading.RLock()
                    self._process = _Process.this
        return self._lock
