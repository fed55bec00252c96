"""How many programs XLA compiles, counted by what jax reports of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass
class Compilations:
    """How many there were in a region."""

    number: int = 0


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """Counts the compilations of the region, those of all threads."""
    from jax import monitoring

    counted = Compilations()

    def count(event: str, duration: float, **_: object) -> None:
        counted.number += event == COMPILED

    monitoring.register_event_duration_secs_listener(count)
    try:
        yield counted
    finally:
        monitoring.unregister_event_duration_listener(count)
