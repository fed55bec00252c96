"""Reports of sparse operands that were stored densely for a call: to callbacks, and to a logger.

The logger is ``masked_dispatch.densification``, the level INFO, so nothing is printed by default::

    logging.basicConfig()
    logging.getLogger("masked_dispatch.densification").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger("masked_dispatch.densification")


@dataclass(frozen=True)
class Densification:
    """Operands of one call that were stored densely for it.

    op        the operator, as torch prints it, or the function of this library
    operands  shape, layout and number of stored elements of each
    bytes     their total size when dense, data and mask; symbolic while tracing with symbolic sizes
    why       why the operator has no sparse form for the call
    """

    op: str
    operands: tuple[str, ...]
    bytes: int | torch.SymInt
    why: str

    def __str__(self) -> str:
        size = f"{self.bytes:,}" if isinstance(self.bytes, int) else str(self.bytes)
        return f"{self.op} stores {' and '.join(self.operands)} densely, {size} bytes: {self.why}"


# Called with every densification in this process; conformance counts them.
on_densify: list[Callable[[Densification], None]] = []


def report(operation: str, tensors: Sequence[Tensor], why: str) -> None:
    """Report that `tensors` are about to be stored densely for an operator or a function of this library."""
    if not on_densify and not logger.isEnabledFor(logging.INFO):
        return
    densification = Densification(operation, tuple(map(storage_of, tensors)), bytes_needed(tensors), why)
    for callback in on_densify:
        callback(densification)
    logger.info("%s", densification)


def bytes_needed(tensors: Sequence[Tensor]) -> int:
    """The size of tensors when dense: data, and one byte of mask per element."""
    return sum(math.prod(t.shape) * (t.dtype.itemsize + 1) for t in tensors)


def storage_of(tensor: Tensor) -> str:
    """The shape, layout and number of stored elements of a masked or torch.sparse tensor."""
    layout, stored = getattr(tensor, "storage_layout", tensor.layout), getattr(tensor, "nnz", None)
    return f"shape {tuple(tensor.shape)} as {layout} with {tensor._nnz() if stored is None else stored} stored"
