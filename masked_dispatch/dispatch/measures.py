"""Errors inside libraries that measure predictions: they say which pairs to pass."""

from __future__ import annotations

from masked_dispatch.engine_internals import frames_to_caller
from op_registry.errors import InvalidValueError

# Libraries that read values or sizes of their arguments; none of them supports masks.
MEASURES = frozenset(("ignite", "sklearn", "torcheval", "torchmetrics"))


def name_pairs(error: RuntimeError) -> None:
    """Add a hint to an error about an invalid value, before the caller raises it again: what to pass to the library."""
    if not isinstance(error, InvalidValueError):
        return
    library = frames_to_caller()[-1][0].partition(".")[0]
    if library in MEASURES:
        error.args = (
            f"{error} {library} asked, which knows no masks: pass it what is valid, "
            "*masked_dispatch.metrics.valid_pairs(predicted, target)",
        )
