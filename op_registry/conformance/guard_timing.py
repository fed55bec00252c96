"""Skip Dynamo's measurement of how long guards take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

NAME = "profile_guard_manager"


def _no_time(*arguments: object) -> float:
    return 0.0


@contextlib.contextmanager
def guards_not_timed() -> Iterator[None]:
    """Inside, Dynamo does not time its guards, a number that it only logs.

    Before it measures, it flushes the processor's caches, which takes a tenth of the time of a small compilation.
    """
    kernel = getattr(torch._C._dynamo.guards, NAME, None)
    _use(_no_time, instead_of=kernel)
    try:
        yield
    finally:
        _use(kernel, instead_of=_no_time)


def _use(function: object, instead_of: object) -> None:
    """Replace a function in the module that Dynamo imports it from and, if Dynamo is loaded, in Dynamo's module."""
    for module in (torch._C._dynamo.guards, sys.modules.get("torch._dynamo.guards")):
        if instead_of is not None and getattr(module, NAME, None) is instead_of:
            setattr(module, NAME, function)
