"""Ends of a batch that callers may take for ends of samples: whoever shows warnings is told here."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from op_registry.extents.factors import Factor, Positions, as_positions, is_prefix
from op_registry.records.kept import kept_with
from op_registry.records.tracing import computed_at_once, has_values, recording
from op_registry.records.validity import as_bool

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


def ends_with_batch(factor: Factor, dim: int) -> bool:
    """Whether the last index of `dim` is the last position of each sample that has any; False in a graph that does not
    know.
    """
    known = as_positions(factor.along[dim])
    if isinstance(known, Positions) and known.parts and known.parts[-1][1] is None:
        return True  # a part is joined at the end that is there everywhere
    return not is_prefix(known) and _all_have(factor, dim, -1)


def begins_with_batch(factor: Factor, dim: int) -> bool:
    """The same of the first index, and of the first position."""
    known = as_positions(factor.along[dim])
    return (isinstance(known, Positions) and known.from_start) or _all_have(factor, dim, 0)


def _all_have(factor: Factor, dim: int, index: int) -> bool:
    """Whether each sample that has positions along `dim` has the one at this index: read once."""
    there = factor.there
    return read_once(there, ("all have", dim, index), lambda t: _nobody_lacks(as_bool(t), dim, index)) or False


def _nobody_lacks(there: Tensor, dim: int, index: int) -> bool:
    return not there.shape[dim] or not bool((there.any(dim) & ~there.select(dim, index)).any())


def read_once(there: Tensor, name: tuple[object, ...], ask: Callable[[Tensor], bool]) -> bool | None:
    """The answer to a question about the values of an extent's boolean, which keeps it; None in a graph."""
    if not computed_at_once(there) or recording() or not has_values(there):
        return None
    if there.is_inference():
        return ask(there)
    kept = kept_with(there)
    found = kept.get(name)
    if found is None:
        found = kept[name] = ask(there)
    return bool(found)


def differs(there: Tensor, dim: int) -> bool:
    """Whether a boolean differs along a dimension; True in a graph, which cannot know."""
    return read_once(there, ("differs", dim), lambda t: bool((t != t.narrow(dim, 0, 1)).any())) is not False
