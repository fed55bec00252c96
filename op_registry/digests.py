"""Names for code that are the same in every process: what a compiled graph on disk was compiled from."""

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
    """A short name for `parts`, the same in every process."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


@functools.cache
def source_digest(path: str) -> str:
    """A digest of a source file, or of every source file below a folder; of the name alone where there is none."""
    root = Path(path)
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root] if root.is_file() else []
    return digest_of(root.name, *(f.read_text(encoding="utf-8", errors="replace") for f in files))


def digest_of_code(*values: Any) -> str:
    """A name for what functions do, and values beside them, as far as sources and the values closed over tell.

    What they do not tell of (a closure over a tensor, an object with a ``__call__``) gets a name that nothing else ever
    has: it is compiled anew in every process.
    """
    return digest_of(*_told(values, ()))


def _told(value: Any, above: tuple[Any, ...]) -> list[str]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)):
        return [repr(value)]
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return [str(value)]
    if any(value is other for other in above):
        return ["itself"]  # a recursive function closes over itself
    inner = _parts(value)
    if inner is None:
        return [f"{os.getpid()} {os.urandom(8).hex()}"]
    return [part for v in inner for part in _told(v, (*above, value))]


def _parts(value: Any) -> list[Any] | None:
    """What a value is made of; None where that cannot be told."""
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *value]
    if isinstance(value, Mapping):
        return [item for pair in value.items() for item in pair]
    if dataclasses.is_dataclass(value):
        return [type(value).__name__, *(getattr(value, f.name) for f in dataclasses.fields(value))]
    if isinstance(value, FunctionType):
        code = value.__code__
        closed_over = [cell.cell_contents for cell in value.__closure__ or ()]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [source_digest(code.co_filename), value.__qualname__, code.co_firstlineno, *closed_over, *given]
    return None
