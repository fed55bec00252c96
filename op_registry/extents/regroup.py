"""Dimensions that are merged and split: what is known of the parts, and how a boolean moves to other dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from torch import Tensor

from op_registry.dimensions.labels import Dimension, Label, atoms
from op_registry.dimensions.sizes import known_to_hold
from op_registry.extents.factors import any_along, fitted, index_along, narrowed
from op_registry.records.broadcast import reshape_validity
from op_registry.records.extent import Along, Factor, Merged, Positions, numbers_positions, without_order
from op_registry.records.regrouped import Part, regrouped
from op_registry.records.validity import as_bool

# What is known along each label.
Known = dict[Label, Along]


def carried(
    factor: Factor,
    operand: Sequence[Dimension],
    result: Sequence[Dimension],
    sizes: Mapping[Label, int],
    broadcast: frozenset[Label] = frozenset(),
) -> Factor | None:
    """A factor of an operand with these dimensions, as a factor of a result with those.

    A dimension that the result does not have leaves no trace, and a factor without any other position is gone. A factor
    does not depend on the labels of `broadcast`, along which the operand has size 1 and the result more.
    """
    known = known_of(factor, operand, sizes)
    kept = {a for dim in result for a in atoms(dim)}
    gone = [a for a, along in known.items() if along is not None and a not in kept]
    positions = [a for a, along in known.items() if numbers_positions(along)]
    if positions and all(a in gone for a in positions):
        return None
    known |= dict.fromkeys(broadcast & known.keys(), None)
    moved = Factor(tuple(_along_of(dim, known, sizes) for dim in result))
    if factor.depends and not moved.matters:
        return None
    if moved.along == factor.along and tuple(operand) == tuple(result):
        return factor
    move = functools.partial(_moved, operand=operand, result=result, known=known, sizes=sizes)
    return factor.moved(moved.along, move)


def known_of(factor: Factor, operand: Sequence[Dimension], sizes: Mapping[Label, int]) -> Known:
    """What a factor knows along each label of an operand's dimensions."""
    known: Known = {}
    for along, dim in zip(factor.along, operand, strict=True):
        parts = atoms(dim)
        known |= {parts[0]: along} if len(parts) == 1 else split(along, parts, sizes)
    return known


def split(along: Along, parts: Sequence[Label], sizes: Mapping[Label, int]) -> Known:
    """What is known of the parts that a dimension is split into: as before, if the split undoes a merge."""
    if isinstance(along, Merged):
        known: Known = {}
        left = list(along.parts)
        for part in parts:
            taken: list[tuple[int, Along]] = []
            while left and (not taken or not _same(math.prod(s for s, _ in taken), sizes[part])):
                taken.append(left.pop(0))
            if not _same(math.prod(s for s, _ in taken), sizes[part]):
                break
            known[part] = taken[0][1] if len(taken) == 1 else _merged(taken)
        else:
            if not left:
                return known
    return dict.fromkeys(parts, without_order(along))


def _same(size: int, other: int) -> bool:
    """Whether two sizes are equal; in a graph, where nothing is known of them, they are not."""
    return known_to_hold(size == other)


def _merged(parts: Sequence[tuple[int, Along]]) -> Along:
    return Merged(tuple(parts)) if any(along is not None for _, along in parts) else None


def _along_of(dim: Dimension, known: Known, sizes: Mapping[Label, int]) -> Along:
    parts = atoms(dim)
    if len(parts) == 1:
        return known.get(parts[0])
    flat: list[tuple[int, Along]] = []
    for part in parts:
        along = known.get(part)
        flat += along.parts if isinstance(along, Merged) else [(sizes[part], along)]
    return _merged(flat)


def _moved(
    there: Tensor, operand: Sequence[Dimension], result: Sequence[Dimension], known: Known, sizes: Mapping[Label, int]
) -> Tensor:
    """A boolean that is moved from the dimensions of an operand to those of a result."""
    if tuple(operand) == tuple(result) and not any(a in known and known[a] is None for a in _wide(there, operand)):
        return there
    labels = [a for dim in operand for a in atoms(dim)]
    shape: list[int] = []
    for size, dim in zip(there.shape, operand, strict=True):
        parts = atoms(dim)
        one = known_to_hold(size == 1)
        shape += [1] * len(parts) if one else [size] if len(parts) == 1 else [sizes[a] for a in parts]
    there = narrowed(there.reshape(shape), [known.get(a) for a in labels])
    order = [a for dim in result for a in atoms(dim)]
    gone = [n for n, a in enumerate(labels) if a not in order and not known_to_hold(there.shape[n] == 1)]
    there = any_along(there, gone)
    # (a label may stand for two dimensions of a result, if the factor depends on neither)
    first = [n for n, a in enumerate(order) if a in labels and a is not None and a not in order[:n]]
    places = [labels.index(order[n]) for n in first]
    rest = [n for n in range(len(labels)) if n not in places]
    there = there.permute([*places, *rest])
    have = iter(there.shape)
    there = there.reshape([next(have) if n in first else 1 for n in range(len(order))])
    if len(order) == len(result):
        return there
    wide = [
        sizes[a] if len(atoms(dim)) > 1 and any(known.get(b) is not None for b in atoms(dim)) else size
        for dim, a, size in zip([dim for dim in result for _ in atoms(dim)], order, there.shape, strict=True)
    ]
    there, widths = there.expand(wide), iter(wide)
    return there.reshape([math.prod(next(widths) for _ in atoms(dim)) for dim in result])


def _wide(there: Tensor, operand: Sequence[Dimension]) -> list[Label]:
    return [
        a for size, dim in zip(there.shape, operand, strict=True) if not known_to_hold(size == 1) for a in atoms(dim)
    ]


# ------------------------------------------------------------------------------------------------------- other sizes


def with_sizes(factor: Factor, shape: Sequence[int], size: Sequence[int]) -> Factor:
    """A factor of a tensor of `shape` whose elements get the sizes of `size`, in order."""
    parts = [p for s, a in zip(shape, factor.along, strict=True) for p in (a.parts if _splits(a, s) else [(s, a)])]
    along = _alongs(parts, size)
    if not any(a is not None and known_to_hold(s == 0) for s, a in zip(shape, factor.along, strict=True)):
        # (a boolean of a tensor without elements has some, along dimensions that have some)
        ones = [[1 if known_to_hold(s == 0) else s for s in sizes] for sizes in (shape, size)]
        shape, size = ones if known_to_hold(math.prod(ones[0]) == math.prod(ones[1])) else (shape, size)
    return factor.moved(tuple(along), lambda there: fitted(reshape_validity(there, shape, size), size, along))


def misplaced(factor: Factor, shape: Sequence[int], size: Sequence[int]) -> Iterator[tuple[Tensor, str]]:
    """Where groups of positions that a change of sizes makes are each sample's own, bool, and what to say elsewhere.

    Of samples that are not known to begin at index 0.
    """
    parts = [p for s, a in zip(shape, factor.along, strict=True) for p in (a.parts if _splits(a, s) else [(s, a)])]
    groups = regrouped(parts, size, lambda along: along is None)
    sizes = [s for taken, _ in groups for s, _ in taken]  # (a part on which nothing depends may be divided)
    dim = start = 0
    for taken, dims in groups:
        named = [n for n, (_, along) in enumerate(taken) if along is not None]
        inner, start = math.prod(size[start + 1 : start + dims]), start + dims
        if dims > 1 and len(named) == 1 and begins_elsewhere(taken[named[0]][1]):
            group = inner // max(math.prod(s for s, _ in taken[named[0] + 1 :]), 1)
            if known_to_hold(group > 0) and group < taken[named[0]][0]:
                there = as_bool(reshape_validity(factor.there, shape, sizes))
                yield _in_groups(there, dim + named[0], group), f"groups of {group} positions are those of the batch"
        dim += len(taken)


def begins_elsewhere(along: Along) -> bool:
    """Whether samples' positions follow one another along the dimension, and are not known to begin at its index 0.

    (Of a dimension that has lost its order, as one that merged samples and positions may, groups may undo the merge.)
    """
    return isinstance(along, Positions) and along.contiguous and not along.from_start


def _in_groups(there: Tensor, dim: int, group: int) -> Tensor:
    """Where positions stand in the same place of groups of this size as they do in the sample alone."""
    size = there.shape[dim]
    index = index_along(dim, size, there.ndim, there.device) % group
    rank = (there.cumsum(dim) - 1) % group
    follows = there.roll(1, dim) | (index == 0)
    return ~there | ((rank == index) & follows)


def _splits(along: Along, size: int) -> TypeGuard[Merged]:
    return isinstance(along, Merged) and _same(math.prod(s for s, _ in along.parts), size)


def _alongs(parts: Sequence[Part[Along]], size: Sequence[int]) -> list[Along]:
    """What is known of dimensions of these sizes, of parts in that order. Those that nothing depends on may divide."""
    groups = regrouped(parts, size, lambda along: along is None)
    return [along for taken, dims in groups for along in (_of_group(taken, dims) if taken else [None] * dims)]


def _of_group(parts: Sequence[Part[Along]], dims: int) -> list[Along]:
    """What is known of dimensions that have as many elements as these parts."""
    if dims == 1:
        told = [p for p in parts if not (p[1] is None and _same(p[0], 1))] or parts
        return [told[0][1] if len(told) == 1 else _merged(told)]
    return [without_order(_merged(parts))] * dims
