"""Dimensions that are merged and split by a view: which parts of the old ones make up each of the new ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from op_registry.dimensions.sizes import known_to_hold

T = TypeVar("T")
# A size, and what has it.
Part = tuple[int, T]


def regrouped(
    parts: Sequence[Part[T]], sizes: Sequence[int], divides: Callable[[T], bool]
) -> list[tuple[list[Part[T]], int]]:
    """The smallest groups of parts, in order, that make up whole dimensions of the new `sizes`: the parts of each
    group, and the number of its dimensions.

    divides  whether what has a size may be divided, and have two parts in the result

    Sizes are compared as `known_to_hold` says; so the last group has everything that remains.
    """
    groups: list[tuple[list[Part[T]], int]] = []
    left = list(parts)
    start = 0
    while start < len(sizes):
        end = start + 1
        if _is_one(sizes, start) and not _next_is_one(left):
            groups.append(([], 1))
            start = end
            continue
        taken = [left.pop(0)] if left else []
        while not known_to_hold((product := _product(taken)) == (wanted := math.prod(sizes[start:end]))):
            more = known_to_hold(product < wanted) or (known_to_hold(wanted == 0) and known_to_hold(product > 0))
            if more and left:
                taken.append(left.pop(0))
            elif (halves := _halves(taken, wanted, divides)) is not None:
                taken[-1:], left = halves[:1], [*halves[1:], *left]
            elif end < len(sizes):
                end += 1
            else:
                break
        # A part of size 1 goes to the next dimension of size 1, or else to this group; but one that cannot be divided
        # does not join parts that can.
        all_divide = end < len(sizes) and all(divides(owner) for _, owner in taken)
        while _next_is_one(left) and not _is_one(sizes, end) and not (all_divide and not divides(left[0][1])):
            taken.append(left.pop(0))
        if end == len(sizes):
            taken, left = taken + left, []
        groups.append((taken, end - start))
        start = end
    return groups


def _is_one(sizes: Sequence[int], place: int) -> bool:
    return place < len(sizes) and known_to_hold(sizes[place] == 1)


def _next_is_one(left: Sequence[Part[T]]) -> bool:
    return bool(left) and known_to_hold(left[0][0] == 1)


def _product(parts: Sequence[Part[T]]) -> int:
    return math.prod(size for size, _ in parts)


def _halves(taken: Sequence[Part[T]], wanted: int, divides: Callable[[T], bool]) -> list[Part[T]] | None:
    """The last part in two, the first of which makes the product as large as wanted; None if it does not divide so."""
    if not taken or not divides(taken[-1][1]):
        return None
    size, owner = taken[-1]
    before = _product(taken[:-1])
    if known_to_hold(before == 0):
        return None
    first = wanted // before
    whole = known_to_hold(first * before == wanted) and known_to_hold(first > 0) and known_to_hold(first < size)
    return [(first, owner), (size // first, owner)] if whole and known_to_hold(size % first == 0) else None
