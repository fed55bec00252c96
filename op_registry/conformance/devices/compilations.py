"""Count the programs that XLA compiles, from the events that jax reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass
class Compilations:
    """The number of compilations in a region."""

    number: int = 0


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """Count the compilations in the region, by all threads."""
    from jax import monitoring

    counted = Compilations()

    def count(event: str, duration: float, **_: object) -> None:
        counted.number += event == COMPILED

    monitoring.register_event_duration_secs_listener(count)
    try:
        yield counted
    finally:
        monitoring.unregister_event_duration_listener(count)
