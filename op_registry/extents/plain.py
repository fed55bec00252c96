"""What is known of dimensions in tuples, texts, numbers and booleans, for files and messages, and read from these."""

from __future__ import annotations

from typing import Any

from op_registry.records.extent import SAMPLES, Along, Extent, Merged, Positions, Samples

# None, ("samples",), ("positions", contiguous, from_start, parts) or ("merged", parts); parts are (size, known) each.
# Samples end with True where a join has made the dimension of samples that may lie at different places.
# Positions end with True where every sample is known to have one: files say so, messages between ranks do not, whose
# samples are others.
Plain = tuple[Any, ...] | None


def known_of(extent: Extent, counts: bool = False) -> tuple[tuple[Plain, ...], ...]:
    """What each factor knows of each dimension, in plain form; with `counts`, whether every sample has a position."""
    return tuple(tuple(in_plain(along, counts) for along in alongs) for alongs in extent.known)


def in_plain(along: Along, counts: bool) -> Plain:
    if along is None:
        return None
    if isinstance(along, Samples):
        return ("samples", True) if along.apart else ("samples",)
    parts = tuple((size, in_plain(part, counts)) for size, part in along.parts)
    if isinstance(along, Merged):
        return ("merged", parts)
    known = ("positions", along.contiguous, along.from_start, parts)
    return (*known, True) if counts and along.nonempty else known


def read(plain: object) -> Along:
    """What is known of a dimension, from its plain form; tuples may be lists. Raises ValueError for anything else."""
    match plain:
        case None:
            return None
        case ("samples",):
            return SAMPLES
        case ("samples", True):
            return Samples(apart=True)
        case ("positions", bool(contiguous), bool(from_start), parts):
            return Positions(contiguous, from_start, _parts(parts))
        case ("positions", bool(contiguous), bool(from_start), parts, True):
            return Positions(contiguous, from_start, _parts(parts), nonempty=True)
        case ("merged", parts):
            return Merged(_parts(parts))
    raise ValueError(f"what it knows of a dimension is {plain!r}")


def _parts(parts: object) -> tuple[tuple[int, Along], ...]:
    if not isinstance(parts, (tuple, list)) or not all(map(_is_part, parts)):
        raise ValueError(f"the parts of a dimension of which it knows something are {parts!r}")
    return tuple((size, read(part)) for size, part in parts)


def _is_part(part: object) -> bool:
    return isinstance(part, (tuple, list)) and len(part) == 2 and type(part[0]) is int and part[0] >= 0
