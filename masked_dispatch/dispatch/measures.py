"""Errors inside of libraries that measure predictions: they name the pairs to pass."""

from __future__ import annotations

from masked_dispatch.engine_internals import frames_to_caller
from op_registry.errors import InvalidValueError

# Libraries that ask for values, or for sizes, of what they are given; none of them knows masks.
MEASURES = frozenset(("ignite", "sklearn", "torcheval", "torchmetrics"))


def name_pairs(error: RuntimeError) -> None:
    """Add to an error about an invalid value, before it is raised again, what to pass to who asked for it."""
    if not isinstance(error, InvalidValueError):
        return
    library = frames_to_caller()[-1][0].partition(".")[0]
    if library in MEASURES:
        error.args = (
            f"{error} {library} asked, which knows no masks: pass it what is valid, "
            "*masked_dispatch.metrics.valid_pairs(predicted, target)",
        )
