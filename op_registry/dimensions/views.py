"""Statements of the dimensions of views: which go where, which are merged and split.

What the labels are depends on sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.dimensions.labels import (
    TO_THE_END,
    Dimension,
    Dimensions,
    Label,
    Labels,
    Part,
    Role,
    batch_labels,
    tensors_in,
)
from op_registry.dimensions.sizes import known_to_hold

aten = torch.ops.aten
# Strides of a tensor that tell its dimensions apart, whatever their sizes.
_PRIMES = tuple(n for n in range(1_000_003, 1_000_400, 2) if all(n % d for d in range(3, 1_001, 2)))


@dataclass(frozen=True)
class View(Dimensions):
    """A view or its copy: which dimension goes where is read off the strides of a view without memory.

    The operator may also write to such a view (``diagonal_scatter``).
    """

    words = "a view: each dimension goes where its stride does"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        view, (first, *others) = _view_of(op), tensors_in(op, named)
        shape = tuple(named[first].shape)
        given = [(a.name, named[a.name]) for a in view._schema.arguments[1:] if a.name in named]
        if view in _OF_ANY_SIZE:
            # (a graph need not work out the sizes of a view: operators on sizes that are symbols take long)
            plain = [(name, tuple(v) if isinstance(v, list) else v) for name, v in given]
            labels, dims, roles = _remembered(view, tuple(1 if _is_one(s) else 2 for s in shape), tuple(plain))
        else:
            labels, dims, roles = _read_off(view, shape, given)
        if others:
            return Labels({first: labels, others[0]: dims[0]}, (labels,), roles)
        ones = [label for label, size in zip(labels, shape, strict=True) if known_to_hold(size == 1)]
        cuts = tuple(tuple(Part(a, kept=False) for a in reversed(ones) if a not in shown) for shown in dims)
        return Labels({first: labels}, dims, roles, cuts=cuts)


Read = tuple[tuple[Label, ...], tuple[tuple[Label, ...], ...], dict[Label, Role]]


def _read_off(view: OpOverload, shape: Sequence[int], given: Sequence[tuple[str, Any]]) -> Read:
    """The labels of a tensor's dimensions and of its views', with their roles."""
    labels = batch_labels(len(shape))
    with torch.no_grad():
        shown = view(torch.empty_strided(shape, _PRIMES[: len(shape)], device="meta"), **dict(given))
    views = [shown] if isinstance(shown, Tensor) else list(shown)
    dims = tuple(_labels_by_strides(v, labels) for v in views)
    roles: dict[Label, Role] = {
        label: "selected"
        for n, label in enumerate(labels)
        if not all(_is_whole(label, shape[n], _PRIMES[n], v, d) for v, d in zip(views, dims, strict=True))
    }
    return labels, dims, roles | dict.fromkeys([a for ds in dims for a in ds if isinstance(a, str)], "new")


_remembered = functools.lru_cache(maxsize=1024)(_read_off)
# Views whose labels depend on no size but 1, and on no index.
_OF_ANY_SIZE = frozenset((aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default))


def _is_one(size: int) -> bool:
    return type(size) is int and size == 1


def _is_whole(label: Label, size: int, stride: int, view: Tensor, dims: Sequence[Label]) -> bool:
    """Whether a view has all indices of a dimension in order; one of size 1 may be expanded."""

    def has_all(shown: int, its_stride: int) -> bool:
        # (strides first, which are numbers: torch.export may refuse sizes because of a question about them)
        if known_to_hold(its_stride == stride):
            return known_to_hold(size == shown)
        one = known_to_hold(size == 1)
        return (one and known_to_hold(shown == 1)) or (
            known_to_hold(its_stride == 0) and not known_to_hold(size == shown)
        )

    return any(d == label and has_all(s, t) for d, s, t in zip(dims, view.shape, view.stride(), strict=True))


@functools.lru_cache(maxsize=256)
def _view_of(op: OpOverload) -> OpOverload:
    """The view that an operator is, copies or writes to."""
    packet = getattr(torch.ops.aten, re.sub("_(copy|scatter)$", "", op._schema.name.removeprefix("aten::")))
    return getattr(packet, op._overloadname if op._overloadname in packet.overloads() else "default")


def _labels_by_strides(view: Tensor, labels: Sequence[Label]) -> tuple[Label, ...]:
    """For each dimension of a view of a tensor with strides _PRIMES, the label that it has there."""
    found: list[Label] = []
    for n in reversed(range(view.ndim)):
        size, stride = view.shape[n], view.stride(n)
        near = n - view.ndim  # a dimension that broadcasts stands at the same place, counted from the last one
        expanded, one = known_to_hold(stride == 0), known_to_hold(size == 1)
        if expanded and not one:
            found.append(near)
            continue
        label = next(
            (
                a
                for a, p in zip(labels, _PRIMES, strict=False)
                if not expanded and a not in found and known_to_hold(stride % p == 0)
            ),
            None,
        )
        found.append(f"new{n}" if label is None and not one else label)
    return tuple(reversed(found))


# ---------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Cut(View):
    """A part of the dimension that the argument `dim` names, or several parts: a view or a copy.

    start, stop, step  the arguments with the bounds of the part, as those of a slice
    length             the argument with the size of the part, in place of `stop`
    index              the argument with the one index that is shown, without the dimension
    sizes              the argument with the sizes of parts one behind the other, or with one size of all

    Without any of these, each index is shown by itself, without the dimension (unbind). The operator may also write to
    the part: its second tensor has the dimensions of that.
    """

    dim: str = "dim"
    start: str | None = None
    stop: str | None = None
    step: str | None = None
    length: str | None = None
    index: str | None = None
    sizes: str | None = None

    words = "a part of dimension `{dim}`; other dimensions are batch"
    needs = ("{dim}", "{start}", "{stop}", "{step}", "{length}", "{index}", "{sizes}")

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        (first, x), *others = tensors_in(op, named).items()
        if not -x.ndim <= named[self.dim] < x.ndim:
            return None
        labels = batch_labels(x.ndim)
        label, size = labels[named[self.dim]], x.shape[named[self.dim]]
        parts = list(self._parts(named, label, size))
        shown = [tuple(a for a in labels if part.kept or a != label) for part in parts]
        roles: dict[Label, Role] = {} if all(part.is_whole(size) for part in parts) else {label: "selected"}
        cuts = tuple((part,) for part in parts)
        if others:
            return Labels({first: labels, others[0][0]: shown[0]}, (labels,), roles, cuts=cuts)
        return Labels({first: labels}, tuple(shown), roles, cuts=cuts)

    def _parts(self, named: Mapping[str, Any], label: Label, size: int) -> Iterator[Part]:
        if self.sizes is not None:
            each = named[self.sizes]
            if isinstance(each, (list, tuple)):
                borders = list(itertools.accumulate(each, initial=0))
            else:
                count = max(int((size + each - 1) // each), 1) if each else 1
                borders = [*(n * each for n in range(count)), size]
            yield from (Part(label, a, b) for a, b in itertools.pairwise(borders))
        elif self.index is not None:
            yield Part(label, named[self.index], kept=False)
        elif self.start is None and self.stop is None:
            yield from (Part(label, n, kept=False) for n in range(size))
        else:
            stated: list[Any] = [None if a is None else named[a] for a in (self.start, self.stop, self.step)]
            start, stop, step = stated[0] or 0, *stated[1:]
            if self.length is not None:
                stop = start + named[self.length]
                stop = None if known_to_hold(start < 0) and known_to_hold(stop >= 0) else stop
            at_the_end = stop is None or (type(stop) is int and stop >= TO_THE_END)
            yield Part(label, start, TO_THE_END if at_the_end else stop, step or 1)


# ------------------------------------------------------------------------------------------------------------- regroups


@dataclass(frozen=True)
class Reshaped(Dimensions):
    """The same elements in order, in other sizes: dimensions are merged and split where their sizes allow it."""

    words = "dimensions are merged and split as the sizes say"
    needs = ("size",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        """Several dimensions that become one are merged, and one that becomes several is split; others are moved."""
        name = op._schema.arguments[0].name
        shape = tuple(named[name].shape)
        size = _without_unknown(tuple(named["size"]), math.prod(shape))
        labels = batch_labels(len(shape))
        before: list[Dimension] = [None] * len(shape)
        after: list[Dimension] = [None] * len(size)
        sizes: dict[Label, int] = {}
        roles: dict[Label, Role] = {}
        for mine, theirs in _runs(shape, size):
            for n in mine:
                before[n] = labels[n]
            if len(theirs) == 1:
                after[theirs[0]] = labels[mine[0]] if len(mine) == 1 else tuple(labels[n] for n in mine)
                continue
            made: list[Label] = [f"new{n}" for n in theirs]
            if len(mine) == 1:
                made = [f"{labels[mine[0]]}.{n}" for n in range(len(theirs))]
                before[mine[0]] = tuple(made)
                sizes |= {label: size[n] for label, n in zip(made, theirs, strict=True)}
            else:
                roles |= dict.fromkeys([labels[n] for n in mine], "moved")
                roles |= dict.fromkeys(made, "new")
            for label, n in zip(made, theirs, strict=True):
                after[n] = label
        return Labels({name: tuple(before)}, (tuple(after),), roles, sizes)


def _without_unknown(size: tuple[int, ...], elements: int) -> tuple[int, ...]:
    known = math.prod(s for s in size if s != -1)
    return tuple((elements // known if known else 0) if s == -1 else s for s in size)


def _runs(shape: Sequence[int], size: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dimensions of both in the shortest runs that have as many elements; those of size 1 may be in none."""
    if shape == size:
        return [([n], [n]) for n in range(len(shape))]
    if 0 in shape:
        return [(list(range(len(shape))), list(range(len(size))))]
    mine, theirs = (_by_elements(sizes) for sizes in (shape, size))
    ends = sorted(mine.keys() & theirs.keys())
    return [
        ([n for end, n in mine.items() if start < end <= stop], [n for end, n in theirs.items() if start < end <= stop])
        for start, stop in itertools.pairwise([1, *ends])
    ]


def _by_elements(sizes: Sequence[int]) -> dict[int, int]:
    """The dimensions that are not of size 1, by how many elements they have with those before."""
    counts = itertools.accumulate(sizes, operator.mul)
    return {count: n for n, (size, count) in enumerate(zip(sizes, counts, strict=True)) if size != 1}
