"""Code that runs when a module is first imported that is not imported for everyone: it takes long, or is optional."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


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
