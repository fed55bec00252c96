"""How factors of operands become those of a result.

Where several meet, samples have to lie at the same places. A factor moves to the dimensions of the result, of which
some are merged of others, or split. Two that depend on the same dimensions become one: a position is there where each
has it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimension, Label, Labels, atoms
from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import any_along, fitted, in_front, index_along, narrowed, where_all, with_size
from op_registry.records.extent import (
    SCATTERED,
    Along,
    Boolean,
    Factor,
    Merged,
    Positions,
    Samples,
    is_apart,
    is_prefix,
    numbers_positions,
    without_order,
)
from op_registry.records.layout import Part, regrouped, reshape_validity
from op_registry.records.tracing import assert_when_run, being_traced, recording, values_of
from op_registry.records.validity import as_bool, as_int8, intersect, is_same_memory
from op_registry.rule import packet_name


def combined(operands: Sequence[Sequence[Factor]], name: str) -> tuple[Factor, ...]:
    """The factors of a result, of those that each operand has there; `name` is the operator's, for the error.

    Raises MaskedSemanticsError if samples lie at different places along a dimension.
    """
    check_layouts(operands, name)
    return together(operands)


def together(operands: Sequence[Sequence[Factor]]) -> tuple[Factor, ...]:
    """The factors of a result, of those that each operand has there, whose samples are known to lie at one place."""
    found: list[Factor] = []
    for factor in [f for factors in operands for f in factors]:
        same = next((n for n, f in enumerate(found) if _depends_alike(f.along, factor.along)), None)
        if same is None:
            found.append(factor)
        else:
            found[same] = both(found[same], factor)
    return tuple(found)


def _depends_alike(a: Sequence[Along], b: Sequence[Along]) -> bool:
    """Whether two factors depend on the same dimensions, and on the same parts of those that are merged alike."""
    return all(
        _depends_alike([p for _, p in x.parts], [p for _, p in y.parts])
        if isinstance(x, Merged) and isinstance(y, Merged) and x.is_of_sizes(y)
        else (x is None) == (y is None)
        for x, y in zip(a, b, strict=True)
    )


def both(a: Factor, b: Factor) -> Factor:
    """Where both factors are, which depend on the same dimensions."""
    if a.along == b.along and a.said is b.said:
        return a
    along = tuple(met(x, y) for x, y in zip(a.along, b.along, strict=True))
    assert a.said is not None
    assert b.said is not None
    return Factor(along, Boolean(intersect, (a.said, b.said)))


def laid_out(parts: Sequence[tuple[Tensor | None, int]], dim: int, like: Tensor) -> Tensor:
    """Booleans end to end along `dim`, each with the size of its part (None: ones)."""
    ones = like.new_ones([1] * like.ndim)
    tensors = [ones if there is None else there for there, _ in parts]
    shape = torch.broadcast_shapes(*[with_size(t.shape, dim, 1) for t in tensors])
    return torch.cat(
        [as_int8(t).expand(with_size(shape, dim, size)) for t, (_, size) in zip(tensors, parts, strict=True)], dim
    )


def met(a: Along, b: Along) -> Along:
    """What is known where both factors are."""
    if a == b:
        return a
    if isinstance(a, Positions) and isinstance(b, Positions):
        # (samples meet at the same places: two that have a position each have the first of them in common)
        return Positions(
            a.contiguous and b.contiguous, a.from_start and b.from_start, nonempty=a.nonempty and b.nonempty
        )
    if isinstance(a, Merged) and isinstance(b, Merged) and a.is_of_sizes(b):
        parts = zip(a.parts, b.parts, strict=True)
        return Merged(tuple((size, x if y is None else y if x is None else met(x, y)) for (size, x), (_, y) in parts))
    return SCATTERED if numbers_positions(a) or numbers_positions(b) else Samples(is_apart(a) or is_apart(b))


def check_layouts(operands: Sequence[Sequence[Factor]], name: str) -> None:
    """Refuse operands, with the dimensions of one result, whose samples lie at different places along one of these."""
    if sum(map(bool, operands)) < 2:
        return
    for dim in range(len(next(factors for factors in operands if factors)[0].along)):
        check_along(operands, dim, name)


def check_along(
    operands: Sequence[Sequence[Factor]], dim: int, name: str, names: Sequence[str] = (), number: int | None = None
) -> None:
    """Refuse operands whose samples lie at different places along `dim`, which is the first operand's `number`."""
    met = [(n, [f for f in factors if numbers_positions(f.along[dim])]) for n, factors in enumerate(operands)]
    met = [(n, factors) for n, factors in met if factors]
    if len(met) < 2 or all(is_prefix(f.along[dim]) for _, factors in met for f in factors):
        return
    (n, first), *others = met
    for k, other in others:
        if not _say_the_same(first, other):
            both = f"`{names[n]}` and `{names[k]}`" if names else "two operands"
            _check_places(first, other, dim, (name, both, str(dim if number is None else number)))


def check_meetings(
    call: Bound, labels: Labels, given: Mapping[str, Sequence[Factor]], sizes: Mapping[Label, int]
) -> None:
    """Refuse operands whose samples lie at different places along a dimension by which the operator indexes them
    together, whatever it does there.
    """
    if sum(map(bool, given.values())) < 2:
        return
    for label, met in _met_along(labels, given, sizes).items():
        if len(met) < 2 or all(met.values()):
            continue
        dims = [labels.operands[name] for name in met]
        every = (a for ds in dims for dim in ds for a in atoms(dim))
        space: list[Label] = list(dict.fromkeys(a for a in every if a is not None))
        moved = []
        for name, ds in zip(met, dims, strict=True):
            wide: frozenset[Label] = frozenset(
                a
                for a, size in zip(ds, call.tensors[name].shape, strict=True)
                if not isinstance(a, tuple) and known_to_hold(size == 1) and not known_to_hold(sizes.get(a, 1) == 1)
            )
            factors = [carried(f, ds, space, sizes, wide) for f in given[name]]
            moved.append([f for f in factors if f is not None])
        number = next(d for d, dim in enumerate(dims[0]) if label in atoms(dim))
        check_along(moved, space.index(label), packet_name(call.op), list(met), number)


# Roles of dimensions whose elements an operator combines, though each has a result.
_MIXED = ("each", "scanned", "front", "window")


def check_joined(labels: Labels, given: Mapping[str, Sequence[Factor]], sizes: Mapping[Label, int], name: str) -> None:
    """Refuse a sum over samples that were joined, and lie at different places along a dimension that stays."""
    kept = {a for dims in labels.results for dim in dims for a in atoms(dim)}
    for operand, factors in given.items():
        for factor in factors:
            if not any(map(is_apart, factor.along)):
                continue
            dims = labels.operands[operand]
            known = known_of(factor, dims, sizes)
            gone = [d for d, dim in enumerate(dims) if not kept.issuperset(atoms(dim)) or labels.role_of(dim) in _MIXED]
            mixed = (a for d in gone for a in atoms(dims[d]) if a not in kept or labels.roles.get(a) in _MIXED)
            if any(is_apart(known[a]) for a in mixed):
                for dim in sorted(set(factor.positions).difference(gone)):
                    _check_joined(factor, gone, dim, name)


def _check_joined(factor: Factor, gone: Sequence[int], dim: int, name: str) -> None:
    there = as_bool(factor.there)
    order = in_front(there, dim)
    has = index_along(dim, there.shape[dim], there.ndim, there.device) < there.sum(dim, keepdim=True)
    last = torch.where(has, order, -1)
    same = ~has | (last == (last if known_to_hold(last.numel() == 0) else last.amax(list(gone), keepdim=True)))
    text = (
        f"{name}: it would combine samples that were joined, and that lie at different places along dimension {dim}: "
        "their positions do not belong together. Move the samples to the front first, masked_dispatch.align(x, "
        f"{dim}); or drop what is known of the padding, x.without_extent()."
    )
    check_holds(same, MaskedSemanticsError(text))


def check_holds(condition: Tensor, error: MaskedSemanticsError) -> None:
    """Raise an error unless a condition holds everywhere; in a graph, when it runs, RuntimeError with its name."""
    if being_traced(condition) or recording():
        assert_when_run(condition, f"{type(error).__name__}: {error}")
    elif not bool(values_of(condition).all()):
        raise error


def _met_along(
    labels: Labels, given: Mapping[str, Sequence[Factor]], sizes: Mapping[Label, int]
) -> dict[Label, dict[str, bool]]:
    """For each label the operands that number positions along it, and whether these are known to be the first ones."""
    found: dict[Label, dict[str, bool]] = {}
    for name, factors in given.items():
        for factor in factors:
            for label, along in known_of(factor, labels.operands[name], sizes).items():
                if numbers_positions(along) and label is not None:
                    met = found.setdefault(label, {})
                    met[name] = met.get(name, True) and is_prefix(along)
    return found


def _say_the_same(a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    return len(a) == len(b) and all(x.said is y.said and x.along == y.along for x, y in zip(a, b, strict=True))


def _check_places(a: Sequence[Factor], b: Sequence[Factor], dim: int, words: tuple[str, ...]) -> None:
    """Refuse samples whose k-th positions along `dim` lie at different indices, for a k that both have."""
    mine, other = (_share(x, y, dim) for x, y in ((a, b), (b, a)))
    if is_same_memory(mine, other):
        return
    traced = being_traced(mine) or being_traced(other) or recording()
    if not traced and mine.shape == other.shape and bool(values_of(mine == other).all()):
        return
    valid, others = torch.broadcast_tensors(as_bool(mine), as_bool(other))
    rank, rank_of_other = valid.cumsum(dim), others.cumsum(dim)
    count, count_of_other = valid.sum(dim, keepdim=True), others.sum(dim, keepdim=True)
    at_same = (
        (valid & others & (rank == rank_of_other))
        | (valid & ~others & (rank > count_of_other))
        | (~valid & others & (rank_of_other > count))
        | ~(valid | others)
    )
    if traced:
        check_holds(at_same, MaskedSemanticsError(_different_places(words)))
        return
    at_same, valid, others = map(values_of, (at_same, valid, others))
    if bool(at_same.all()):
        return
    lines = at_same.all(dim)
    found = tuple(int(n) for n in lines.logical_not().nonzero()[0])
    places = [t.movedim(dim, -1)[found].nonzero().flatten().tolist() for t in (valid, others)]
    sample = [n for n, size in zip(found, lines.shape, strict=True) if size != 1]
    raise MaskedSemanticsError(_different_places(words, sample, places))


def _share(factors: Sequence[Factor], others: Sequence[Factor], dim: int) -> Tensor:
    """Which indices of `dim` are positions, whichever position it is along dimensions that the others do not have."""
    there = where_all(factors)
    known = {d for f in others for d in f.depends}
    gone = [d for d in {d for f in factors for d in f.positions} if d != dim and d not in known]
    return any_along(there, gone)


def _different_places(words: tuple[str, ...], sample: Sequence[int] = (), places: Sequence[Sequence[int]] = ()) -> str:
    """The refusal, of the operator, two operands, and the dimension."""
    name, both, dim = words
    what = f"{name}: {both} have samples at different places along dimension {dim}"
    align = f"Move the samples of both to the front first, masked_dispatch.align(x, {dim})"
    drop = "drop what is known of the padding, x.without_extent()"
    if not places:
        return f"{what}, so that their positions do not belong together. {align}; or {drop}."
    same = next((n for n, (a, b) in enumerate(zip(*places, strict=False)) if a != b), min(map(len, places)))
    skipped = same if same >= 4 else 0  # (what is shown differs)
    mine, others = (
        f"{'... ' if skipped else ''}{list(p[skipped : skipped + 4])}{' and so on' if len(p) > skipped + 4 else ''}"
        for p in places
    )
    where = f"those of sample {sample[0] if len(sample) == 1 else tuple(sample)}" if sample else "its positions"
    what = f"{what}: {where} are {mine} of the first and {others} of the second, and do not belong together."
    if all(p == list(range(p[0], p[-1] + 1)) for p in map(list, places) if p):
        return f"{what} {align}; or {drop}."
    return f"{what} There are gaps, as between positions chosen by index: combine before they are chosen, or {drop}."


# --------------------------------------------------------------------------------- dimensions that are merged and split

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
    if moved.along == factor.along and all(
        along is None or mine == other for along, mine, other in zip(factor.along, operand, result, strict=True)
    ):
        return factor  # the very same boolean: so that factors that were moved to and fro are known to be one
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
    labels, order = ([a for dim in dims for a in atoms(dim)] for dims in (operand, result))
    there = narrowed(_split_dims(there, operand, sizes), [known.get(a) for a in labels])
    there = _in_order(there, labels, order)
    return there if len(order) == len(result) else _merged_dims(there, result, known, sizes)


def _wide(there: Tensor, operand: Sequence[Dimension]) -> list[Label]:
    return [
        a for size, dim in zip(there.shape, operand, strict=True) if not known_to_hold(size == 1) for a in atoms(dim)
    ]


def _split_dims(there: Tensor, operand: Sequence[Dimension], sizes: Mapping[Label, int]) -> Tensor:
    """A boolean with a dimension for each label."""
    shape: list[int] = []
    for size, dim in zip(there.shape, operand, strict=True):
        parts = atoms(dim)
        one = known_to_hold(size == 1)
        shape += [1] * len(parts) if one else [size] if len(parts) == 1 else [sizes[a] for a in parts]
    return there.reshape(shape)


def _in_order(there: Tensor, labels: Sequence[Label], order: Sequence[Label]) -> Tensor:
    """A boolean whose dimensions have these labels, with those of `order`: where it holds at an index of the others.

    A label may stand for two dimensions of a result, if the factor depends on neither.
    """
    there = any_along(
        there, [n for n, a in enumerate(labels) if a not in order and not known_to_hold(there.shape[n] == 1)]
    )
    first = [n for n, a in enumerate(order) if a in labels and a is not None and a not in order[:n]]
    places = [labels.index(order[n]) for n in first]
    there = there.permute([*places, *(n for n in range(len(labels)) if n not in places)])
    found = iter(there.shape)
    return there.reshape([next(found) if n in first else 1 for n in range(len(order))])


def _merged_dims(there: Tensor, result: Sequence[Dimension], known: Known, sizes: Mapping[Label, int]) -> Tensor:
    """A boolean with a dimension for each label, of which those of one dimension are merged."""
    wide: list[int] = []
    for dim in result:
        parts, own = atoms(dim), there.shape[len(wide) : len(wide) + len(atoms(dim))]
        depends = len(parts) > 1 and any(known.get(a) is not None for a in parts)
        wide += [sizes[a] for a in parts] if depends else own
    widths = iter(wide)
    return there.expand(wide).reshape([math.prod(next(widths) for _ in atoms(dim)) for dim in result])


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
        shown = [p for p in parts if not (p[1] is None and _same(p[0], 1))] or parts
        return [shown[0][1] if len(shown) == 1 else _merged(shown)]
    return [without_order(_merged(parts))] * dims
