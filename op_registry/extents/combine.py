"""Factors that meet in one result: what two operands know of the same dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Label, Labels, atoms
from op_registry.dimensions.sizes import known_to_hold
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import any_along, index_along, where_all, with_size
from op_registry.extents.regroup import carried, known_of
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
)
from op_registry.records.tracing import assert_when_run, being_traced, recording, values_of
from op_registry.records.validity import as_bool, as_int8, intersect
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
    order = there.logical_not().to(torch.uint8).argsort(dim=dim, stable=True)
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
    if mine is other:
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
    mine, others = (f"{list(p[:4])}{' and so on' if len(p) > 4 else ''}" for p in places)
    where = f"those of sample {sample[0] if len(sample) == 1 else tuple(sample)}" if sample else "its positions"
    what = f"{what}: {where} are {mine} of the first and {others} of the second, and do not belong together."
    if all(p == list(range(p[0], p[-1] + 1)) for p in map(list, places) if p):
        return f"{what} {align}; or {drop}."
    return f"{what} There are gaps, as between positions chosen by index: combine before they are chosen, or {drop}."
