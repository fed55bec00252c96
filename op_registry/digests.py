"""Digests of code that are the same in every process, as cache keys of compiled graphs on disk."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket


def digest_of(*parts: str) -> str:
    """A digest of strings, the same in every process."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


@functools.cache
def source_digest(path: str) -> str:
    """A digest of a source file, or of all source files below a folder; of its name if it does not exist."""
    root = Path(path)
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root] if root.is_file() else []
    return digest_of(root.name, *(f.read_text(encoding="utf-8", errors="replace") for f in files))


def digest_of_code(*values: Any) -> str:
    """A digest of functions and values: of their sources and the values that they close over.

    Anything else (a closure over a tensor, an object with a ``__call__``, a function typed at a prompt, whose source no
    file has) gets a unique digest, and is recompiled in every process.
    """
    return digest_of(*_digest_parts(values, ()))


def _digest_parts(value: object, above: tuple[Any, ...]) -> list[str]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)):
        return [repr(value)]
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return [str(value)]
    if any(value is other for other in above):
        return ["itself"]  # a recursive function closes over itself
    contents = _contents(value)
    if contents is None:
        return [f"{os.getpid()} {os.urandom(8).hex()}"]
    return [part for v in contents for part in _digest_parts(v, (*above, value))]


def _contents(value: object) -> list[Any] | None:
    """The parts of a value; None for types that cannot be hashed."""
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *value]
    if isinstance(value, Mapping):
        return [item for pair in value.items() for item in pair]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(getattr(value, f.name) for f in dataclasses.fields(value))]
    if isinstance(value, FunctionType) and Path(value.__code__.co_filename).is_file():
        code = value.__code__
        closed_over = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [source_digest(code.co_filename), value.__qualname__, code.co_firstlineno, *closed_over, *defaults]
    return None
