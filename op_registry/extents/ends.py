"""Ends of a batch that callers may take for ends of samples: whoever shows warnings is told here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.extent import Factor, Positions, as_positions, is_prefix
from op_registry.records.kept import kept_with
from op_registry.records.tracing import computed_at_once, has_values, recording
from op_registry.records.validity import as_bool

# Called with the text of a warning; masked_dispatch shows it at the caller's line.
listeners: list[Callable[[str], None]] = []
# How often they were told.
told = 0
# Called with the text of a warning of a window that leaves samples without any position.
emptied: list[Callable[[str], None]] = []


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


def keeps_all(there: Tensor, dim: int, after: Tensor, count: Callable[[int], int], window: str) -> bool:
    """Whether windows leave a position to each sample that had one along `dim`; tells of those that do not.

    there  which positions a sample has, and `after`: which windows
    count  how many windows a sample of this length has

    Samples' lengths are read once for a batch, and then follow from window to window. In a graph they are unknown: it
    tells of a window of which the batch itself has only one, as in pooling over its whole size.
    """
    if count(1) > 0:
        return True
    kept = _kept(there)
    if kept is None:
        if known_to_hold(after.shape[dim] <= 1) and not known_to_hold(there.shape[dim] <= 1):
            _tell_of(window, "may have been longer than")
        return False
    shortest = kept.get(("shortest", dim))
    if shortest is None:
        lengths = there.sum(dim, dtype=torch.int64)
        positive = torch.where(lengths > 0, lengths, there.shape[dim] + 1)
        shortest = kept[("shortest", dim)] = int(positive.min()) if positive.numel() else there.shape[dim] + 1
    if shortest > there.shape[dim]:  # no sample had any
        return True
    left = count(shortest)
    if left < 1:
        _tell_of(window, "is longer than")
        return False
    follows = _kept(after)
    if follows is not None:
        follows[("shortest", dim)] = left
    return True


def hand_on(known: Tensor, mask: Tensor) -> None:
    """What is known of lengths of a boolean is known of a mask that is equal to it."""
    own, other = _kept(known), _kept(mask)
    if own is not None and other is not None:
        other.update({key: own[key] for key in list(own) if key[0] == "shortest"})


def _tell_of(window: str, than: str) -> None:
    text = (
        f"{window} {than} some samples of a padded batch, which have no position left: nothing follows for them, and a "
        "loss leaves them out. (Alone, torch raises.) Pooling over a whole sample is x.amax(dim), x.mean(dim) or "
        "adaptive pooling; else pad such samples (padding=), or leave them out."
    )
    for tell in emptied:
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
    kept = _kept(there)
    if kept is None:
        return None
    found = kept.get(name)
    if found is None:
        found = kept[name] = ask(there)
    return bool(found)


def _kept(there: Tensor) -> dict[Any, Any] | None:
    """What is kept of a boolean whose values can be read; None in a graph."""
    if not computed_at_once(there) or recording() or not has_values(there):
        return None
    return {} if there.is_inference() else kept_with(there)


def differs(there: Tensor, dim: int) -> bool | None:
    """Whether a boolean differs along a dimension; None in a graph, which cannot know."""
    return read_once(there, ("differs", dim), lambda t: t.numel() > 0 and bool((t != t.narrow(dim, 0, 1)).any()))
