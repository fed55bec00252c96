"""What of torch is in fact replaced, found by looking at all of its modules, classes and tables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

OWN = ("masked_dispatch", "op_registry")
# How the names begin of what this library notes on objects of torch, which torch does not read.
NOTE = "_masked_dispatch"


def is_ours(value: Any) -> bool:
    """Whether a function, a property of functions or a class comes from this library, whatever it says of itself."""
    kind = type(value)  # isinstance would ask the object itself, and torch's deprecated ones warn
    if issubclass(kind, property):
        return any(map(is_ours, (value.fget, value.fset)))
    if issubclass(kind, (staticmethod, classmethod)):
        return is_ours(value.__func__)
    if issubclass(kind, FunctionType):
        return _is_own(value.__globals__.get("__name__", ""))
    return issubclass(kind, type) and _is_own(value.__module__)


def _is_own(module: str) -> bool:
    """Conformance, which replaces some of torch while it tests, does not count."""
    return module.startswith(OWN) and not module.startswith("op_registry.conformance")


def found() -> Iterator[str]:
    """The full names of all that is replaced in what is loaded of torch; entries for types of ours replace nothing."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == "torch":
            for key, value in list(vars(module).items()):
                yield from _found_in(name, key, value, seen)


def _found_in(owner: str, key: Any, value: Any, seen: set[int]) -> Iterator[str]:
    if is_ours(value):
        # What was imported by its name after it was replaced is that one.
        yield getattr(value, "replaces", f"{owner}.{key}")
    elif issubclass(type(value), dict) and not str(key).startswith("__"):
        yield from (f"{owner}.{key}[{_word(k)}]" for k, v in list(value.items()) if is_ours(v) and not is_ours(k))
    elif issubclass(type(value), type) and value.__module__.partition(".")[0] == "torch" and id(value) not in seen:
        seen.add(id(value))
        name = value.__qualname__ if "." in value.__qualname__ else f"{value.__module__}.{value.__qualname__}"
        for inner in list(vars(value)):
            if not inner.startswith(NOTE):
                yield from _found_in(name, inner, inspect.getattr_static(value, inner), seen)


def _word(key: Any) -> str:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else str(key)
