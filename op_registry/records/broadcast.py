"""Broadcast validity has fewer elements than the data; views and moves of the data keep it small.

A padded batch holds one validity per token, (B, T, 1), beside data (B, T, D). Moving the data must not
expand the validity to the data's size: a validity dimension of size 1 keeps size 1 wherever the move allows it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense, same_sizes
from op_registry.records.dims import with_leading_dims
from op_registry.records.tracing import being_traced
from op_registry.records.validity import as_int8


def aligned_validity(x: Dense) -> Tensor | None:
    """The validity with the data's number of dimensions, each of the data's size or 1; None if all are valid."""
    v = x.validity
    return v if v is None or v.ndim == x.ndim else with_leading_dims(v, x.ndim - v.ndim)


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
