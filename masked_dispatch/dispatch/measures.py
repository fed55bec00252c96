"""Errors inside of libraries that measure predictions: they name the pairs to pass."""

from __future__ import annotations

from masked_dispatch.engine_internals import frames_to_caller
from op_registry.errors import InvalidValueError

# Libraries that ask for values, or for sizes, of what they are given; none of them knows masks.
MEASURES = frozenset(("ignite", "sklearn", "torcheval", "torchmetrics"))


def naming_pairs(error: RuntimeError) -> RuntimeError:
    """The error, or, where a library of measures asked for an invalid value, one that says what to pass to it."""
    if not isinstance(error, InvalidValueError):
        return error
    library = frames_to_caller()[-1][0].partition(".")[0]
    if library not in MEASURES:
        return error
    return InvalidValueError(
        f"{error} {library} asked, which knows no masks: pass it what is valid, "
        "*masked_dispatch.metrics.valid_pairs(predicted, target)"
    )
