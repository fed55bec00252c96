"""Ends of a batch that callers may take for ends of samples: whoever shows warnings is told here."""

from __future__ import annotations

from collections.abc import Callable

# Called with the text of a warning; masked_dispatch shows it at the caller's line.
listeners: list[Callable[[str], None]] = []
# How often they were told.
told = 0


def batch_end(call: str, instead: str) -> None:
    """A view shows an end of the batch along a dimension that numbers positions of samples.

    call     what the caller wrote, without numbers that vary in a loop: a line is told once
    instead  what has each sample's own
    """
    global told
    told += 1
    text = (
        f"{call} is an end of the batch, where shorter samples have padding. {instead} takes each sample's own; "
        "x.without_extent() says that the batch's is meant."
    )
    for tell in listeners:
        tell(text)
