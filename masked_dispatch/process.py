"""What a process and its threads have for themselves: locks; code that runs when a module is first imported."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# --------------------------------------------------------------------------------------------- locks, also after a fork


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


# -------------------------------------------------------------------------------------------------------- later imports


class _Waiting(MetaPathFinder):
    """Finds one module as Python does, and calls a function when the module has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported: now, if it has been already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Waiting(name, then))
