"""Statements of the dimensions of views: which go where, which are merged and split.

What the labels are depends on sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.dimensions.labels import Dimension, Dimensions, Label, Labels, Role, batch_labels, tensors_in

# Strides of a tensor that tell its dimensions apart, whatever their sizes.
_PRIMES = tuple(n for n in range(1_000_003, 1_000_400, 2) if all(n % d for d in range(3, 1_001, 2)))
# Views whose copies have another name, and overloads whose name differs from that of what writes to them.
_VIEWS = {"narrow_copy": "narrow", "unsafe_split": "split", "unsafe_split_with_sizes": "split_with_sizes"}
_OVERLOADS = {"select": "int", "slice": "Tensor", "split": "Tensor"}


@dataclass(frozen=True)
class View(Dimensions):
    """A view or its copy: which dimension goes where is read off the strides of a view without memory.

    The operator may also write to such a view (``select_scatter``), or be the view's derivative (``select_backward``).
    """

    words = "a view: each dimension goes where its stride does"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        view, (first, *others) = _view_of(op), tensors_in(op, named)
        shape = tuple(named["input_sizes"] if "input_sizes" in named else named[first].shape)
        labels = batch_labels(len(shape))
        names = [a.name for a in view._schema.arguments[1:]]
        with torch.no_grad():
            x = torch.empty_strided(shape, _PRIMES[: len(shape)], device="meta")
            shown = view(x, **{name: named[name] for name in names if name in named})
        views = [shown] if isinstance(shown, Tensor) else list(shown)
        dims = tuple(_labels_by_strides(v, labels) for v in views)
        roles: dict[Label, Role] = {
            label: "selected"
            for n, label in enumerate(labels)
            if not all(_is_whole(label, shape[n], _PRIMES[n], v, d) for v, d in zip(views, dims, strict=True))
        }
        roles |= dict.fromkeys([a for ds in dims for a in ds if isinstance(a, str)], "new")
        if "input_sizes" in named:
            return Labels({first: dims[0]}, (labels,), roles)
        if others:
            return Labels({first: labels, others[0]: dims[0]}, (labels,), roles)
        return Labels({first: labels}, dims, roles)


def _is_whole(label: Label, size: int, stride: int, view: Tensor, dims: Sequence[Label]) -> bool:
    """Whether a view has all indices of a dimension in order; one of size 1 may be expanded."""
    return any(
        d == label and (t == 0 if size != s else t == stride or size == 1)
        for d, s, t in zip(dims, view.shape, view.stride(), strict=True)
    )


@functools.lru_cache(maxsize=256)
def _view_of(op: OpOverload) -> OpOverload:
    """The view that an operator is, copies, writes to or is the derivative of."""
    name = op._schema.name.removeprefix("aten::")
    view = _VIEWS.get(name, re.sub("_(copy|scatter|backward)$", "", name))
    packet = getattr(torch.ops.aten, view)
    named = op._overloadname in packet.overloads() and view not in _OVERLOADS
    found: OpOverload = getattr(packet, op._overloadname if named else _OVERLOADS.get(view, "default"))
    return found


def _labels_by_strides(view: Tensor, labels: Sequence[Label]) -> tuple[Label, ...]:
    """For each dimension of a view of a tensor with strides _PRIMES, the label that it has there."""
    found: list[Label] = []
    for n in reversed(range(view.ndim)):
        size, stride = view.shape[n], view.stride(n)
        near = n - view.ndim  # a dimension that broadcasts stands at the same place, counted from the last one
        if stride == 0 and size != 1:
            found.append(near)
            continue
        label = next(
            (a for a, p in zip(labels, _PRIMES, strict=False) if stride and stride % p == 0 and a not in found), None
        )
        found.append(f"new{n}" if label is None and size != 1 else label)
    return tuple(reversed(found))


# ------------------------------------------------------------------------------------------------------------- regroups


@dataclass(frozen=True)
class Reshaped(Dimensions):
    """The same elements in order, in other sizes: dimensions are merged and split where their sizes allow it."""

    words = "dimensions are merged and split as the sizes say"
    needs = ("size",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        name, *_ = [a.name for a in op._schema.arguments]
        shape = tuple(named[name].shape)
        size = _without_unknown(tuple(named["size"]), math.prod(shape))
        mine, theirs, sizes, roles = _regrouped(shape, size)
        return Labels({name: mine}, (theirs,), roles, sizes)


def _without_unknown(size: tuple[int, ...], elements: int) -> tuple[int, ...]:
    known = math.prod(s for s in size if s != -1)
    return tuple((elements // known if known else 0) if s == -1 else s for s in size)


Regrouped = tuple[tuple[Dimension, ...], tuple[Dimension, ...], dict[Label, int], dict[Label, Role]]


def _regrouped(shape: tuple[int, ...], size: tuple[int, ...]) -> Regrouped:
    """The dimensions before and after, the sizes of their parts, and roles of dimensions that have no common parts."""
    labels = batch_labels(len(shape))
    if shape == size:
        return labels, labels, {}, {}
    if 0 in shape:
        return labels, tuple(f"new{n}" for n in range(len(size))), {}, _moved(labels, len(size))
    before: list[Dimension] = []
    after: list[Dimension] = []
    sizes: dict[Label, int] = {}
    roles: dict[Label, Role] = {}
    i = j = 0
    while i < len(shape) or j < len(size):
        n, m = i, j
        a = b = 1
        while a != b or (n == i and m == j) or (n == i and i < len(shape)):
            if n < len(shape) and (a <= b or m >= len(size)):
                a, n = a * shape[n], n + 1
            elif m < len(size):
                b, m = b * size[m], m + 1
            else:
                break
            if n > i and m == j and m < len(size):
                b, m = b * size[m], m + 1
        mine, theirs = _group(labels[i:n], shape[i:n], size[j:m], j, sizes, roles)
        before, after = [*before, *mine], [*after, *theirs]
        i, j = n, m
    return tuple(before), tuple(after), sizes, roles


def _moved(labels: Sequence[Label], new: int) -> dict[Label, Role]:
    roles: dict[Label, Role] = dict.fromkeys(labels, "moved")
    return roles | dict.fromkeys([f"new{n}" for n in range(new)], "new")


def _group(
    labels: Sequence[Label],
    shape: Sequence[int],
    size: Sequence[int],
    at: int,
    sizes: dict[Label, int],
    roles: dict[Label, Role],
) -> tuple[list[Dimension], list[Dimension]]:
    """The dimensions of a group that has as many elements before as after."""
    parts = _parts(shape, size)
    if parts is None:
        roles |= dict.fromkeys(labels, "moved")
        new: list[Dimension] = [f"new{at + n}" for n in range(len(size))]
        roles |= {d: "new" for d in new if isinstance(d, str)}
        return list(labels), new
    before, after, widths = parts
    names: dict[int, Label] = {}
    for label, members in zip(labels, before, strict=True):
        names |= {p: label if len(members) == 1 else f"{label}.{k}" for k, p in enumerate(members)}
    sizes |= {names[p]: widths[p] for p in names}
    return [_merged([names[p] for p in m]) for m in before], [_merged([names[p] for p in m]) for m in after]


def _merged(labels: Sequence[Label]) -> Dimension:
    return (labels[0] if len(labels) == 1 else tuple(labels)) if labels else None


def _parts(shape: Sequence[int], size: Sequence[int]) -> tuple[list[list[int]], list[list[int]], list[int]] | None:
    """Parts that both have in common: those of each dimension before, those of each after, and their sizes."""
    cuts = [[math.prod(s[n:]) for n in range(len(s) + 1)] for s in (shape, size)]
    every = sorted({*cuts[0], *cuts[1]}, reverse=True)
    if any(a % b for a, b in itertools.pairwise(every)):
        return None
    widths = [a // b for a, b in itertools.pairwise(every)]
    of = [
        [
            [p for p in range(len(widths)) if cut[n] >= every[p] and every[p + 1] >= cut[n + 1]]
            for n in range(len(cut) - 1)
        ]
        for cut in cuts
    ]
    # Dimensions of size 1 before are parts of their own, merged into the dimension that follows or goes before.
    before = [m if m else [len(widths) + n] for n, m in enumerate(of[0])]
    ones = [m[0] for m in before if m[0] >= len(widths)]
    widths += [1] * (max(ones, default=len(widths) - 1) + 1 - len(widths))
    after = of[1]
    if ones:
        host = next((n for n, m in enumerate(after) if m), 0 if after else None)
        if host is not None:
            after = [[*ones, *m] if n == host else m for n, m in enumerate(after)]
    return before, after, widths
