"""More statements of dimensions: of operators that move, join, window or look up elements, or state nothing."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.dimensions.labels import (
    Dimension,
    Dimensions,
    Label,
    Labels,
    Role,
    Window,
    atoms,
    batch_labels,
    counted_from_the_end,
    number_of_results,
    tensors_in,
)
from op_registry.dimensions.sizes import known_to_hold

# --------------------------------------------------------------------------------------------------- nothing, or a case


@dataclass(frozen=True)
class Unknown(Dimensions):
    """Nothing is stated of the dimensions, for a reason.

    reads    the operands of which it reads what is valid, and gives one result for all of it: each with the dimensions
             along which it does so (None: all)
    lengths  the operands of which it reads as many steps of each sequence as an argument says, with that argument
    """

    why: str
    reads: tuple[tuple[str, tuple[int, ...] | None], ...] = ()
    lengths: tuple[tuple[str, str], ...] = ()

    words = "nothing is stated: {why}"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> None:
        return None


@dataclass(frozen=True)
class ByArgument(Dimensions):
    """One statement where an argument is true (not 0, not None), another where it is not."""

    argument: str
    true: Dimensions
    false: Dimensions

    words = "with `{argument}`: {true}; without: {false}"
    needs = ("{argument}",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        value = named.get(self.argument)
        true = hasattr(value, "ndim") or bool(value)
        return (self.true if true else self.false).labels(op, named)

    def misfit(self, op: OpOverload) -> str | None:
        return super().misfit(op) or self.true.misfit(op) or self.false.misfit(op)


@dataclass(frozen=True)
class Loss(Dimensions):
    """As stated where `reduction` is 0; otherwise what would be batch is reduced, and results are numbers."""

    each: Dimensions

    words = "{each}; reduced with `reduction`"

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
    size  of windows that lie in the dimension as wholes, how many indices each has, and `step` how many lie from one to
          the next (none: 1); or the arguments that say so

    An operand of one dimension lies along them.
    """

    role: Role | None
    dim: str = "dim"
    more: int = 0
    size: str | int | None = None
    step: str | None = None

    needs = ("{dim}", "{size}", "{step}")

    def __str__(self) -> str:
        role = "batch" if self.role is None else self.role
        return f"{role} along `{self.dim}`; other dimensions are batch"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, dims = tensors_in(op, named), named.get(self.dim)
        labels = batch_labels(max(t.ndim for t in tensors.values()))
        listed = (dims,) if isinstance(dims, int) else dims or range(len(labels))
        if not labels or any(not -len(labels) <= d < len(labels) for d in listed):
            return None
        along = [labels[d] for d in listed]
        operands = {n: (along[0],) if t.ndim == 1 else batch_labels(t.ndim) for n, t in tensors.items()}
        new = tuple(f"new{n}" for n in range(self.more))
        roles: dict[Label, Role] = dict.fromkeys(new, "new")
        if self.role is not None:
            roles |= dict.fromkeys(along, self.role)
        result = tuple(a for a in labels if self.role != "reduced" or a not in along) + new
        windows: dict[Label, Window] = {}
        if self.size is not None:
            given = (
                self.size if isinstance(self.size, int) else named[self.size],
                named[self.step] if self.step else 1,
            )
            sizes, steps = (_each(value, len(along)) for value in given)
            windows = {a: Window(*window) for a, *window in zip(along, sizes, steps, strict=True)}
        return Labels(operands, (result,) * number_of_results(op), roles, windows=windows)

    def from_the_end(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return counted_from_the_end(named, self.dim)


def _each(value: int | Sequence[int] | None, count: int) -> list[Any]:
    """What an argument has for each of several dimensions: a number holds for all."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


@dataclass(frozen=True)
class Moved(Dimensions):
    """Elements that change places along the dimensions that an argument names: their order is reversed.

    by  the argument with how many indices further they move, round the end of the dimension, in their order
    """

    dim: str = "dims"
    by: str | None = None

    needs = ("{dim}", "{by}")

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        found = Along("moved", self.dim).labels(op, named)
        if found is None or named[self.dim] in ([], ()):  # (roll takes the elements of all dimensions, then)
            return found
        dims = _each(named[self.dim], 1)
        labels = next(iter(found.operands.values()))
        shifts = _each(named[self.by] if self.by else None, len(dims))
        return replace(found, moves=tuple((labels[d], n) for d, n in zip(dims, shifts, strict=True)))

    def some(self, named: Mapping[str, Any], which: Sequence[int]) -> dict[str, Any]:
        """The arguments of a call that makes these of its moves."""
        lists = {name: named[name] for name in (self.dim, self.by) if name is not None}
        return {name: [v[n] for n in which] if isinstance(v, (list, tuple)) else v for name, v in lists.items()}

    def from_the_end(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return counted_from_the_end(named, self.dim)

    def __str__(self) -> str:
        how = "in reversed order" if self.by is None else f"moved by `{self.by}`"
        return f"{how} along `{self.dim}`; other dimensions are batch"


@dataclass(frozen=True)
class Windows(Dimensions):
    """An operator that reads windows along the last dimensions of its first tensor; all results have its dimensions.

    Another tensor has all of these dimensions, or those before and one of its own at the end.


    count  the argument whose length is their number (half of it, for widths on both sides); without it, the operator's
           name says it: ``max_pool2d``
    """

    count: str | None = None

    words = "windows along the last dimensions; those before are batch"
    needs = ("{count}",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        (name, x), *others = tensors_in(op, named).items()
        count = len(named[self.count]) // 2 if self.count is not None else _dimensions_in_name(op)
        labels = batch_labels(x.ndim)
        roles: dict[Label, Role] = dict.fromkeys(labels[x.ndim - count :], "window")
        operands: dict[str, tuple[Label, ...]] = {name: labels}
        for other, tensor in others:
            if tensor.ndim == x.ndim:
                operands[other] = labels
                continue
            rest = labels[: x.ndim - count][1 - tensor.ndim :]
            operands[other] = (*(None,) * (tensor.ndim - 1 - len(rest)), *rest, f"{other}.last")
            roles[f"{other}.last"] = "contracted"
        return Labels({**operands}, (labels,) * number_of_results(op), roles)

    def misfit(self, op: OpOverload) -> str | None:
        if self.count is not None:
            return super().misfit(op)
        named = re.search(r"\dd", op._schema.name)
        return None if named else f"Windows(): {op} does not say of how many dimensions"


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


@dataclass(frozen=True)
class OnDiagonal(Dimensions):
    """The last dimension lies on a diagonal of two new ones, `dim1` and `dim2` of the result."""

    words = "the last dimension lies on a diagonal of two; other dimensions are batch"
    needs = ("dim1", "dim2")

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels:
        ((name, x),) = tensors_in(op, named).items()
        labels = batch_labels(x.ndim)
        new = {named["dim1"] % (x.ndim + 1), named["dim2"] % (x.ndim + 1)}
        rest = iter(labels[:-1])
        result: tuple[Label, ...] = tuple(f"new{d}" if d in new else next(rest) for d in range(x.ndim + 1))
        roles: dict[Label, Role] = dict.fromkeys([f"new{d}" for d in new], "new")
        return Labels({name: labels}, (result,), roles | {-1: "indexed"})


@dataclass(frozen=True)
class Unsqueezed(Dimensions):
    """A sum over `sumdim` of a product of operands, each with dimensions of size 1 inserted where an argument says."""

    words = "contracted along `sumdim`; other dimensions are batch"
    needs = ("sumdim",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors = tensors_in(op, named)
        every = range(next(iter(tensors.values())).ndim + len(named["expand1"]))
        summed, *inserted = (
            {d % len(every) for d in named[a]} for a in ("sumdim", *(f"expand{n + 1}" for n in range(len(tensors))))
        )
        operands = {
            name: tuple(f"d{d}" for d in every if d not in ones) for name, ones in zip(tensors, inserted, strict=True)
        }
        result = tuple(f"d{d}" for d in every if d not in summed)
        return Labels({**operands}, (result,), {f"d{d}": "contracted" for d in summed})


# ------------------------------------------------------------------------------------------------------ other positions


@dataclass(frozen=True)
class Indexed(Dimensions):
    """An operator that reads or writes at positions along `dim`, which the operand `index` names.

    aligned  whether the index has all dimensions of the operand (gather, scatter), or is a list of positions
    writes   whether the result has the operand's dimensions; otherwise, the index's
    """

    aligned: bool = False
    writes: bool = False

    words = "at the positions in `index` along `dim`; other dimensions are batch"
    needs = ("dim", "index")

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, first = tensors_in(op, named), op._schema.arguments[0].name
        x, others = tensors[first], {name: t for name, t in tensors.items() if name != first}
        if not x.ndim or any(t.ndim != x.ndim for t in others.values() if self.aligned):
            return Labels(dict.fromkeys(tensors, ()), ((),)) if not any(t.ndim for t in tensors.values()) else None
        labels = batch_labels(x.ndim)
        along = labels[named["dim"]]
        # Where others have other sizes, they reach the first indices alone.
        elsewhere = {along} | {
            d
            for t in others.values()
            if self.aligned
            for d in range(-t.ndim, 0)
            if not known_to_hold(t.shape[d] == x.shape[d])
        }
        there: tuple[Label, ...] = tuple(f"position{d}" if d in elsewhere else d for d in range(-x.ndim, 0))
        operands = {
            name: there if self.aligned or name == "source" else (there[along],) if name == "index" else ()
            for name in others
        }
        roles: dict[Label, Role] = dict.fromkeys(elsewhere, "indexed")
        if self.writes:
            roles |= dict.fromkeys([label for label in there if label not in labels], "indexed")
        counts: dict[str, tuple[Label, ...]] = {"index": (along,)}
        return Labels({first: labels} | operands, (labels if self.writes else there,), roles, counts=counts)


@dataclass(frozen=True)
class AtIndices(Dimensions):
    """An operator that reads, or writes `values`, where a list of indices says, as ``x[:, i, j]`` does.

    Masks are positions in one dimension of the result, of which nothing else is known.
    """

    words = "at the positions in `indices`; dimensions without one are batch"
    needs = ("indices",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, first = tensors_in(op, named), op._schema.arguments[0].name
        labels = batch_labels(tensors[first].ndim)
        operands: dict[str, tuple[Label, ...]] = {first: labels}
        counts: dict[str, tuple[Label, ...]] = {}
        indexed: list[int] = []
        width = at = 0
        for n, index in enumerate(named["indices"]):
            covered = index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
            if index is not None:
                is_mask = index.dtype in (torch.bool, torch.uint8)
                indexed += range(at, at + covered)
                width = max(width, 1 if is_mask else index.ndim)
                counts |= {} if is_mask else {f"indices[{n}]": labels[at : at + 1]}
                places = batch_labels(index.ndim)
                operands[f"indices[{n}]"] = tuple(f"{'mask' if is_mask else 'position'}{d}" for d in places)
            at += covered
        new = tuple(f"position{d}" for d in batch_labels(width))
        rest = tuple(label for n, label in enumerate(labels) if n not in indexed)
        adjacent = bool(indexed) and indexed == list(range(indexed[0], indexed[0] + len(indexed)))
        shown = (*rest[: indexed[0]], *new, *rest[indexed[0] :]) if adjacent else (*new, *rest)
        roles: dict[Label, Role] = dict.fromkeys([labels[n] for n in indexed], "indexed")
        masks = [a for dims in operands.values() for a in dims if str(a).startswith("mask")]
        roles |= dict.fromkeys([*masks, *(new if masks or "values" in tensors else ())], "indexed")
        if "values" not in tensors:
            return Labels({**operands}, (shown,), roles, counts=counts)
        operands["values"] = shown[len(shown) - tensors["values"].ndim :]
        return Labels({**operands}, (labels,), roles, counts=counts)


@dataclass(frozen=True)
class Repeated(Dimensions):
    """Each dimension `repeats` times in order, and new ones in front."""

    words = "each dimension is repeated; its parts are the repeat and the operand's index"
    needs = ("repeats",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        name = op._schema.arguments[0].name
        labels, repeats = batch_labels(named[name].ndim), named["repeats"]
        new = len(repeats) - len(labels)
        result: list[Dimension] = [f"times{n}" for n in range(new)]
        result += [(f"times{new + n}", label) for n, label in enumerate(labels)]
        times: dict[Label, int] = {f"times{n}": t for n, t in enumerate(repeats)}
        return Labels({name: labels}, (tuple(result),), dict.fromkeys(times, "new"), times)


@dataclass(frozen=True)
class OfSizes(Dimensions):
    """A tensor whose sizes are an argument; none of its dimensions is an operand's."""

    size: str = "size"

    words = "no dimension is an operand's: the sizes are `{size}`"
    needs = ("{size}",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        operands = {name: tuple(f"{name}.{n}" for n in range(t.ndim)) for name, t in tensors_in(op, named).items()}
        unread: dict[Label, Role] = dict.fromkeys([a for dims in operands.values() for a in dims], "selected")
        new = tuple(f"new{n}" for n in range(len(named[self.size])))
        return Labels({**operands}, (new,) * number_of_results(op), unread | dict.fromkeys(new, "new"))
