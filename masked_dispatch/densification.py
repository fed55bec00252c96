"""Sparse operands that were stored densely for a call: told to whoever watches, and logged.

The logger is ``masked_dispatch.storage``, the level INFO, so that nothing is printed unless it is asked for::

    logging.basicConfig()
    logging.getLogger("masked_dispatch.storage").setLevel(logging.INFO)
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("masked_dispatch.storage")


@dataclass(frozen=True)
class Densification:
    """Operands of one call that were stored densely for it.

    op        the operator, as torch prints it, or the function of this library
    operands  shape, layout and number of stored elements of each
    bytes     what they take densely together, data and mask; symbolic while a graph with symbolic sizes is traced
    why       why the operator has no sparse form for the call
    """

    op: str
    operands: tuple[str, ...]
    bytes: Any
    why: str

    def __str__(self) -> str:
        size = f"{self.bytes:,}" if isinstance(self.bytes, int) else str(self.bytes)
        return f"{self.op} stores {' and '.join(self.operands)} densely, {size} bytes: {self.why}"


# Told of every densification in this process; conformance counts them.
watchers: list[Callable[[Densification], None]] = []
_collected: contextvars.ContextVar[list[Densification] | None] = contextvars.ContextVar(
    "masked_dispatch.densifications", default=None
)


def report(what: str, tensors: Sequence[Any], why: str) -> None:
    """Tell that `tensors` are about to be stored densely for `what`: an operator, or a function of this library."""
    collected = _collected.get()
    if not watchers and collected is None and not logger.isEnabledFor(logging.INFO):
        return
    found = Densification(what, tuple(map(storage_of, tensors)), bytes_needed(tensors), why)
    for watcher in watchers:
        watcher(found)
    if collected is not None:
        collected.append(found)
    logger.info("%s", found)


def bytes_needed(tensors: Sequence[Any]) -> int:
    """What tensors take densely: data, and a byte of mask for each element."""
    return sum(math.prod(t.shape) * (t.dtype.itemsize + 1) for t in tensors)


def storage_of(tensor: Any) -> str:
    """How a masked tensor is stored, or one of torch's own sparse ones."""
    layout, stored = getattr(tensor, "storage_layout", tensor.layout), getattr(tensor, "nnz", None)
    return f"shape {tuple(tensor.shape)} as {layout} with {tensor._nnz() if stored is None else stored} stored"


@contextlib.contextmanager
def collecting() -> Iterator[list[Densification]]:
    """A list of what this thread or task stores densely inside the block."""
    found: list[Densification] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)
