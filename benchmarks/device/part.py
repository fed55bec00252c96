"""A part of the check: rows, one after another, until its time is up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from op_registry.workers import in_processes

# What was found of one thing: "what" it is, of which "kind", figures, "wrong" if the check fails by it, "repeat": a
# command; "failed" if there is no figure, "not asked" if something is missing for it, here.
Row = dict[str, Any]
# Each part has `rows(device, until)`: none is begun after `until`, in seconds of time.monotonic(). And KINDS: of each
# there is a row, or the part came to nothing there.

# Processes that share a GPU: each has a context of its own there, and a core for its Python.
MOST_PROCESSES = 14
# The most operators of a process, and the most seconds of an operator.
MOST_ITEMS, ITEM_SECONDS = 100, 60.0


def spread(work: Callable[[Any, Callable[[str], None]], Row], items: Sequence[Any], device: str, until: float) -> Any:
    """The answers of `work` for the items, in several processes on a GPU, else in this one, until the time is up."""
    if device != "cuda":
        for item in items:
            if time.monotonic() >= until:
                return
            yield work(item, lambda line: None)
        return
    processes = min(MOST_PROCESSES, len(items), max(1, (os.cpu_count() or 1) - 2))
    yield from in_processes(work, items, processes, ITEM_SECONDS, MOST_ITEMS, until=until)


def kinds_missing(kinds: Sequence[str], found: Sequence[Row]) -> list[str]:
    """The kinds of which there is no row. (One of no kind that says why nothing is asked is one of each.)"""
    if any("not asked" in row and "kind" not in row for row in found):
        return []
    present = {row.get("kind") for row in found if "failed" not in row}
    return [kind for kind in kinds if kind not in present]


def die_with_the_device(device: str) -> None:
    """End this process if an earlier call has broken the device: all later ones would fail for its sake."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def failure(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
