"""More statements of dimensions: of operators that move, join, window or look up elements, or state nothing.

What their labels are may depend on sizes: a view of other sizes merges and splits dimensions.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.dimensions import (
    Dimension,
    Dimensions,
    Label,
    Labels,
    Role,
    atoms,
    batch_labels,
    number_of_results,
    tensors_in,
)

# --------------------------------------------------------------------------------------------------- nothing, or a case


@dataclass(frozen=True)
class Unknown(Dimensions):
    """Nothing is stated, for a reason."""

    why: str

    def __str__(self) -> str:
        return f"nothing is stated: {self.why}"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> None:
        return None


@dataclass(frozen=True)
class ByArgument(Dimensions):
    """One statement where an argument is true (not 0, not None), another where it is not."""

    argument: str
    true: Dimensions
    false: Dimensions

    def __str__(self) -> str:
        return f"with `{self.argument}`: {self.true}; without: {self.false}"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        value = named.get(self.argument)
        true = hasattr(value, "ndim") or bool(value)
        return (self.true if true else self.false).labels(op, named)

    def misfit(self, op: OpOverload) -> str | None:
        if self.argument not in [a.name for a in op._schema.arguments]:
            return f"ByArgument({self.argument!r}): the operator has no argument of this name"
        return self.true.misfit(op) or self.false.misfit(op)


@dataclass(frozen=True)
class Loss(Dimensions):
    """As stated where `reduction` is 0; otherwise what would be batch is reduced, and results are numbers."""

    each: Dimensions

    def __str__(self) -> str:
        return f"{self.each}; reduced with `reduction`"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        found = self.each.labels(op, named)
        if found is None or not named["reduction"]:
            return found
        every = {a for dims in found.operands.values() for dim in dims for a in atoms(dim) if a is not None}
        reduced: dict[Label, Role] = dict.fromkeys(every, "reduced")
        return replace(found, results=((),) * len(found.results), roles=reduced | {**found.roles})

    def misfit(self, op: OpOverload) -> str | None:
        return self.each.misfit(op)


# ----------------------------------------------------------------------------------------------------- along dimensions


@dataclass(frozen=True)
class Along(Dimensions):
    """Operands that broadcast, and one role along the dimensions that an argument names (all for none).

    role  what the operator does along them; None: nothing, they are batch
    more  how many dimensions the result has after those of the operands

    An operand of one dimension lies along them.
    """

    role: Role | None
    dim: str = "dim"
    more: int = 0

    def __str__(self) -> str:
        role = "batch" if self.role is None else self.role
        return f"{role} along `{self.dim}`; other dimensions are batch"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, dims = tensors_in(op, named), named.get(self.dim)
        labels = batch_labels(max(t.ndim for t in tensors.values()))
        if not labels:
            return None
        along = [labels[d] for d in ((dims,) if isinstance(dims, int) else dims or range(len(labels)))]
        operands = {n: (along[0],) if t.ndim == 1 else batch_labels(t.ndim) for n, t in tensors.items()}
        new = tuple(f"new{n}" for n in range(self.more))
        roles: dict[Label, Role] = dict.fromkeys(new, "new")
        if self.role is not None:
            roles |= dict.fromkeys(along, self.role)
        result = tuple(a for a in labels if self.role != "reduced" or a not in along) + new
        return Labels(operands, (result,) * number_of_results(op), roles)

    def misfit(self, op: OpOverload) -> str | None:
        names = [a.name for a in op._schema.arguments]
        return (
            None if self.dim in names else f"Along(dim={self.dim!r}): the operator's arguments are {', '.join(names)}"
        )


@dataclass(frozen=True)
class Windows(Dimensions):
    """An operator that reads windows along the last dimensions of its first tensor; all results have its dimensions.

    Another tensor has the dimensions before those, and one of its own at the end.


    count  the argument whose length is their number (half of it, for widths on both sides); without it, the operator's
           name says it: ``max_pool2d``
    """

    count: str | None = None

    def __str__(self) -> str:
        return "windows along the last dimensions; those before are batch"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        (name, x), *others = tensors_in(op, named).items()
        count = len(named[self.count]) // 2 if self.count is not None else _dimensions_in_name(op)
        labels = batch_labels(x.ndim)
        roles: dict[Label, Role] = dict.fromkeys(labels[x.ndim - count :], "window")
        operands: dict[str, tuple[Label, ...]] = {name: labels}
        for other, tensor in others:
            rest = labels[: x.ndim - count][1 - tensor.ndim :]
            operands[other] = (*(None,) * (tensor.ndim - 1 - len(rest)), *rest, f"{other}.last")
            roles[f"{other}.last"] = "contracted"
        return Labels({**operands}, (labels,) * number_of_results(op), roles)

    def misfit(self, op: OpOverload) -> str | None:
        if self.count is None:
            return (
                None if re.search(r"\dd", op._schema.name) else f"Windows(): {op} does not say of how many dimensions"
            )
        return None if self.count in [a.name for a in op._schema.arguments] else f"Windows({self.count!r})"


@functools.lru_cache(maxsize=256)
def _dimensions_in_name(op: OpOverload) -> int:
    found = re.search(r"(\d)d", op._schema.name)
    assert found is not None
    return int(found[1])


@dataclass(frozen=True)
class Joined(Dimensions):
    """Tensors one behind the other along `dim`, a new dimension if `stacked`; each has the others' other dimensions."""

    stacked: bool = False

    def __str__(self) -> str:
        return f"operands one behind the other along {'a new' if self.stacked else 'the'} dimension `dim`"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, dim = tensors_in(op, named), named["dim"]
        ndim = max(t.ndim for t in tensors.values())
        result = batch_labels(ndim + self.stacked)
        along = result[dim]
        rest = tuple(label for label in result if label != along) if self.stacked else result
        # torch.cat skips empty tensors of one dimension.
        operands = {name: rest if t.ndim == len(rest) else (along,) for name, t in tensors.items()}
        return Labels(operands, (result,), {along: "joined"})


# ------------------------------------------------------------------------------------------------------ other positions


@dataclass(frozen=True)
class Indexed(Dimensions):
    """An operator that reads or writes at positions along `dim`, which the operand `index` names.

    aligned  whether the index has all dimensions of the operand (gather, scatter), or is a list of positions
    writes   whether the result has the operand's dimensions; otherwise, the index's
    """

    aligned: bool = False
    writes: bool = False

    def __str__(self) -> str:
        return "at the positions in `index` along `dim`; other dimensions are batch"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, first = tensors_in(op, named), op._schema.arguments[0].name
        x, others = tensors[first], {name: t for name, t in tensors.items() if name != first}
        if not x.ndim or any(t.ndim != x.ndim for t in others.values() if self.aligned):
            return Labels(dict.fromkeys(tensors, ()), ((),)) if not any(t.ndim for t in tensors.values()) else None
        labels = batch_labels(x.ndim)
        along = labels[named["dim"]]
        # Where others have other sizes, they reach the first indices alone.
        elsewhere = {along} | {
            d for t in others.values() if self.aligned for d in range(-t.ndim, 0) if t.shape[d] != x.shape[d]
        }
        there: tuple[Label, ...] = tuple(f"position{d}" if d in elsewhere else d for d in range(-x.ndim, 0))
        operands = {
            name: there if self.aligned or name == "source" else (there[along],) if name == "index" else ()
            for name in others
        }
        roles: dict[Label, Role] = dict.fromkeys(elsewhere, "indexed")
        if self.writes:
            roles |= dict.fromkeys([label for label in there if label not in labels], "indexed")
        return Labels({first: labels} | operands, (labels if self.writes else there,), roles)

    def misfit(self, op: OpOverload) -> str | None:
        names = [a.name for a in op._schema.arguments]
        return None if {"dim", "index"} <= {*names} else "Indexed(): the operator has no dim and index"


# ---------------------------------------------------------------------------------------------------------------- views

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

    def __str__(self) -> str:
        return "a view: each dimension goes where its stride does"

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

    def __str__(self) -> str:
        return "dimensions are merged and split as the sizes say"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        name, *_ = [a.name for a in op._schema.arguments]
        shape = tuple(named[name].shape)
        size = _without_unknown(tuple(named["size"]), math.prod(shape))
        mine, theirs, sizes, roles = _regrouped(shape, size)
        return Labels({name: mine}, (theirs,), roles, sizes)

    def misfit(self, op: OpOverload) -> str | None:
        return None if "size" in [a.name for a in op._schema.arguments] else "Reshaped(): the operator has no size"


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


@dataclass(frozen=True)
class Repeated(Dimensions):
    """Each dimension `repeats` times in order, and new ones in front."""

    def __str__(self) -> str:
        return "each dimension is repeated; its parts are the repeat and the operand's index"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        name = op._schema.arguments[0].name
        labels, repeats = batch_labels(named[name].ndim), named["repeats"]
        new = len(repeats) - len(labels)
        result: list[Dimension] = [f"times{n}" for n in range(new)]
        result += [(f"times{new + n}", label) for n, label in enumerate(labels)]
        times: dict[Label, int] = {f"times{n}": t for n, t in enumerate(repeats)}
        return Labels({name: labels}, (tuple(result),), dict.fromkeys(times, "new"), times)

    def misfit(self, op: OpOverload) -> str | None:
        return None if "repeats" in [a.name for a in op._schema.arguments] else "Repeated(): no repeats"


@dataclass(frozen=True)
class OfSizes(Dimensions):
    """A tensor whose sizes are an argument; none of its dimensions is an operand's."""

    size: str = "size"

    def __str__(self) -> str:
        return f"no dimension is an operand's: the sizes are `{self.size}`"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        operands = {name: tuple(f"{name}.{n}" for n in range(t.ndim)) for name, t in tensors_in(op, named).items()}
        unread: dict[Label, Role] = dict.fromkeys([a for dims in operands.values() for a in dims], "selected")
        new = tuple(f"new{n}" for n in range(len(named[self.size])))
        return Labels({**operands}, (new,) * number_of_results(op), unread | dict.fromkeys(new, "new"))

    def misfit(self, op: OpOverload) -> str | None:
        return None if self.size in [a.name for a in op._schema.arguments] else f"OfSizes({self.size!r})"
