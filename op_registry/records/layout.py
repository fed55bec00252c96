"""Validity with fewer elements than the data, which views and moves of the data keep small; merged and split
dimensions; validity laid out like the data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.records.arguments import with_leading_dims
from op_registry.records.dense import Dense, same_sizes
from op_registry.records.tracing import being_traced, under_transform
from op_registry.records.validity import as_int8

# ----------------------------------------------------------------------------- dimensions that a view merges and splits

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


# --------------------------------------------------------------------------------------------------- broadcast validity


def aligned_validity(x: Dense) -> Tensor | None:
    """The validity with the data's number of dimensions, each of the data's size or 1; None if all are valid."""
    v = x.validity
    return v if v is None or v.ndim == x.data.ndim else with_leading_dims(v, x.ndim - v.ndim)


def broadcast_along(validity: Tensor, dim: int) -> bool:
    """Whether an aligned validity has one element for all of a dimension.

    In a graph, a dimension whose size depends on data, as in ``x[mask]``, has a full validity.
    """
    return known_to_hold(validity.shape[dim] == 1)


def expand_validity(validity: Tensor, shape: Sequence[int], dims: Iterable[int]) -> Tensor:
    """An aligned validity expanded to the data's size in `dims` (by stride 0), unchanged in the others."""
    sizes = list(validity.shape)
    for d in dims:
        sizes[d] = shape[d]
    return validity.expand(sizes)


def full_mask(x: Dense) -> Tensor:
    """The validity in the data's full shape, all ones if the record stores none: for operators that write into it."""
    v = x.full_validity
    return x.data.new_ones((), dtype=torch.int8).expand(x.shape) if v is None else v


def concatenated(parts: Sequence[Dense], dim: int) -> Dense:
    """Records one after the other along `dim`."""
    return Dense(torch.cat([part.data for part in parts], dim), torch.cat([full_mask(part) for part in parts], dim))


def reshape_validity(validity: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """An aligned validity of data of shape `old`, for the same data in shape `new`.

    We match dimensions of both shapes in groups of equal size, (T, 6) with (T, 2, 3). A validity that broadcasts over a
    whole group still does, (B, T, 1) → (B, T, 1, 1). If it broadcasts over a group's last dimensions, it still does in
    the last dimensions that divide them, (B, 1) of (B, 2 · 4) → (2 · B, 1) of (2 · B, 4). Otherwise we expand it.
    """
    if same_sizes(validity.shape, old) if being_traced(validity) else tuple(validity.shape) == tuple(old):
        return validity.reshape(new)
    if known_to_hold(math.prod(old) == 0):
        return validity.expand(old).reshape(new)
    if being_traced(validity):
        plan = _reshaping(tuple(validity.shape), tuple(old), tuple(new))
    else:
        plan = _remembered_reshaping(tuple(validity.shape), tuple(old), tuple(new))
    if plan is None:
        return validity.expand(old).reshape(new)
    expanded, result = plan
    if tuple(validity.shape) != expanded:
        validity = validity.expand(expanded)
    return validity.reshape(result)


def _reshaping(
    validity: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape to expand a validity to, and the shape to give it then; None if they depend on data."""
    sizes: list[int] = []
    result: list[int] = []
    groups = _groups(old, new)
    if groups is None:
        return None
    for before, after in groups:
        same = _last_run(before, lambda d: known_to_hold(validity[d] == 1))
        repeats = math.prod(old[d] for d in same)
        kept = after if len(same) == len(before) else _last_dividing(after, new, repeats)
        inside = math.prod(new[d] for d in kept)
        sizes += [old[d] for d in before if d not in same]
        sizes += [repeats // inside if d == same[0] else 1 for d in same]
        result += [1 if d in kept else new[d] for d in after]
    return tuple(sizes), tuple(result)


_remembered_reshaping = functools.lru_cache(maxsize=1024)(_reshaping)


def _last_run(dims: range, holds: Callable[[int], bool]) -> range:
    """The longest run of last dimensions that all satisfy `holds`."""
    start = dims.stop
    while start > dims.start and holds(start - 1):
        start -= 1
    return range(start, dims.stop)


def _last_dividing(dims: range, sizes: Sequence[int], number: int) -> range:
    """The longest run of last dimensions whose product of sizes divides `number`."""
    start, product = dims.stop, 1
    while start > dims.start and known_to_hold(number % (product * sizes[start - 1]) == 0):
        start -= 1
        product *= sizes[start]
    return range(start, dims.stop)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]] | None:
    """The finest matching runs of dimensions of two shapes with the same, non-zero number of elements.

    None in a graph whose sizes depend on data, because the ends of the runs then depend on data too.
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i, j
        if i < len(old) and (j == len(new) or (known_to_hold(old[i] == 1) and not known_to_hold(new[j] == 1))):
            i += 1
        elif j < len(new) and (i == len(old) or (known_to_hold(new[j] == 1) and not known_to_hold(old[i] == 1))):
            j += 1
        else:
            before, after = old[i], new[j]
            i, j = i + 1, j + 1
            while not known_to_hold(before == after):
                if known_to_hold(before < after) and i < len(old):
                    before, i = before * old[i], i + 1
                elif known_to_hold(before > after) and j < len(new):
                    after, j = after * new[j], j + 1
                else:
                    return None
        groups.append((range(a, i), range(b, j)))
    return groups


def joinable_validities(records: Sequence[Dense], along: int | None = None) -> list[Tensor]:
    """Validities that torch.cat can join: each has the data's size `along` a dimension, and all agree in the others.

    A dimension over which all of them broadcast keeps size 1.
    """
    ndim = records[0].ndim
    aligned_validities = [aligned_validity(x) for x in records]
    stored = [v for v in aligned_validities if v is not None]
    full = [d == along or not all(broadcast_along(v, d) for v in stored) for d in range(ndim)]
    joinable = []
    for x, v in zip(records, aligned_validities, strict=True):
        sizes = [x.shape[d] if full[d] else 1 for d in range(ndim)]
        joinable.append(as_int8(x.data.new_ones((), dtype=torch.int8) if v is None else v).expand(sizes))
    return joinable


# ----------------------------------------------------------------------------- operators that address memory by strides

aten = torch.ops.aten


def new_buffer(data: Tensor, *, valid: bool) -> Dense:
    """A record around new memory, with all elements valid or none.

    In a graph and inside transforms it stores the mask in full, because later writes cannot change the mask's storage.
    """
    if being_traced(data) or under_transform():
        make = torch.ones_like if valid else torch.zeros_like
        return Dense(data, make(data, dtype=torch.int8))
    return Dense(data, None if valid else data.new_zeros((1,) * data.ndim, dtype=torch.int8))


def validity_in_strides_of_data(
    x: Dense, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> Tensor:
    """The validity with the data's strides, so that each element's validity has the element's offset in memory.

    The caller makes a view with this size, stride and offset; raises if the view may show elements that `x` does not.
    """
    memory, v = torch.empty_like(x.data, dtype=torch.int8), as_int8(full_mask(x))
    if memory.stride() == x.data.stride():
        return torch.ones_like(x.data, dtype=torch.int8) & v
    if not _lies_apart(x.data) or not _shows(x.data, size, stride, storage_offset):
        raise MaskedSemanticsError(
            f"as_strided of data of shape {tuple(x.shape)} and strides {x.data.stride()} may reach elements that "
            "the tensor does not show, and nothing says whether they are valid. Use slices, or x.contiguous() first."
        )
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.data.stride(), strict=True))
    with_gaps = aten.as_strided_scatter(v.new_zeros(span), v, x.shape, x.data.stride())
    return with_gaps.as_strided(x.shape, x.data.stride())


def _lies_apart(data: Tensor) -> bool:
    """Whether we know that no two elements share memory: each dimension steps beyond the extent of all inner ones."""
    inside = 0
    for s, n in sorted((s, n) for n, s in zip(data.shape, data.stride(), strict=True) if n != 1):
        if n == 0 or s <= inside:
            return False
        inside += (n - 1) * s
    return True


def _shows(data: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> bool:
    """Whether such a view shows only elements of `data`, which lie apart: a part of them, or some of its dimensions."""
    if any(n == 0 for n in size):
        return True
    left = [(s, n) for n, s in zip(data.shape, data.stride(), strict=True) if n != 1]
    for n, s in zip(size, stride, strict=False):
        if n != 1:
            of_data = [dim for dim in left if dim[0] == s and n <= dim[1]]
            if not of_data:
                return False
            left.remove(of_data[0])
    return storage_offset is None or storage_offset == data.storage_offset()


def offset_within_data(x: Dense, storage_offset: int | None) -> int | None:
    """A storage offset into the data's memory, relative to the data's first element."""
    return None if storage_offset is None else storage_offset - int(x.data.storage_offset())
