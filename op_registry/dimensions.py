"""Dimensions: which of them an operator works on, stated once for each rule.

A statement gives every dimension of a call a *label*. Dimensions with one label are one index; what the operator does
along a label is its *role*::

    Equation("mk,kn->mn")              mm: k is contracted, m and n are batch
    Equation("*k,nk,+->*n")            linear: any batch; the bias is added, elementwise with the result
    Slices("one")                      sum(dim): each slice over `dim` gives one result
    Slices("each")                     softmax(dim), cumsum(dim): one result for each element of a slice
    LastDims("normalized_shape")       layer_norm: slices over the last dimensions; parameters belong to them
    LastDims(2)                        inv: the slices are matrices
    Elementwise()                      every dimension is batch

Along a *batch* label, an operator treats every index by itself: the result at one index depends on the operands at this
index alone. From that follow the lowerings to sparse and packed storage, the fast path for rows, slices that are valid
as a whole or not at all, the oracles of operators of other libraries, and the text of a refusal.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch._ops import OpOverload

# A letter of an equation; a negative number for a dimension that broadcasts, counted from the last one of those; None
# for a dimension of size 1 that a reduction keeps.
Label = str | int | None
# What an operator does along a label that is not batch: it sums products over it; one result takes the place of all
# its elements; each element has a result; results come in order at the front.
Role = Literal["contracted", "reduced", "each", "front"]


@dataclass(frozen=True)
class Labels:
    """The dimensions of one call.

    operands  the labels of each tensor argument's dimensions, by its name
    results   those of each result
    roles     the role of each label that is not batch
    added     the operands that are added to a contraction
    """

    operands: Mapping[str, tuple[Label, ...]]
    results: tuple[tuple[Label, ...], ...]
    roles: Mapping[Label, Role] = field(default_factory=dict)
    added: tuple[str, ...] = ()

    def row_of(self, name: str) -> int:
        """How many last dimensions of the operand make up a row, which the operator treats by itself: it works along
        these dimensions alone, and only they stand in other operands. All of them if there is no smaller row.
        """
        labels = self.operands[name]
        shared = {label for other, named in self.operands.items() if other != name for label in named}
        inner = [n for n, label in enumerate(labels) if label in self.roles or label in shared]
        return len(labels) - min(inner, default=len(labels))


class Dimensions:
    """A statement of an operator's dimensions; its kinds are the classes below."""

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        """The labels of a call, whose arguments are given by name; None if the statement does not fit the call.

        Tensors may be records or anything else that has `ndim`; what is computed does not depend on sizes.
        """
        raise NotImplementedError

    def from_the_end(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The same arguments with dimensions counted from the last one, so that they hold for stored rows as well."""
        return dict(named)

    def misfit(self, op: OpOverload) -> str | None:
        """Why no call of the overload can be as stated; None if it can."""
        raise NotImplementedError


@functools.lru_cache(maxsize=4096)
def tensor_arguments(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that are one tensor, or an optional one."""
    return tuple(a.name for a in op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


def tensors_in(op: OpOverload, named: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a call by name."""
    return {name: named[name] for name in tensor_arguments(op) if named.get(name) is not None}


@functools.lru_cache(maxsize=4096)
def number_of_results(op: OpOverload) -> int:
    return len(op._schema.returns)


def batch_labels(ndim: int) -> tuple[Label, ...]:
    """Labels of dimensions that broadcast: the last one is -1."""
    return tuple(range(-ndim, 0))


# ---------------------------------------------------------------------------------------------------------- elementwise


@dataclass(frozen=True)
class Elementwise(Dimensions):
    """Operands broadcast; every dimension is batch."""

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels:
        tensors = tensors_in(op, named)
        result = batch_labels(max((t.ndim for t in tensors.values()), default=0))
        operands = {name: batch_labels(t.ndim) for name, t in tensors.items()}
        return Labels(operands, (result,) * number_of_results(op))

    def misfit(self, op: OpOverload) -> str | None:
        return None


# --------------------------------------------------------------------------------------------------------- contractions

ADDED = "+"


@dataclass(frozen=True, init=False)
class Equation(Dimensions):
    """A contraction as in einsum, one term for each tensor argument in the order of the schema.

    ``*`` in front stands for any number of dimensions that broadcast; ``+`` for an operand that is added, elementwise
    with the result. A letter that the result does not have is contracted. Of several equations, for operands of
    different ranks, the first that fits the call holds. Raises ValueError for a text that is none.
    """

    equations: tuple[str, ...]

    def __init__(self, *equations: str) -> None:
        for equation in equations:
            terms, arrow, result = equation.partition("->")
            known = {letter for term in terms.split(",") for letter in term}
            if not arrow or not all(_TERM.fullmatch(term) for term in (*terms.split(","), result)) or result == ADDED:
                raise ValueError(f"{equation!r} is no equation such as 'mk,kn->mn' or '*k,nk,+->*n'")
            if not set(result) <= known:
                raise ValueError(f"{equation!r}: no operand has {', '.join(sorted(set(result) - known))}")
        if not equations:
            raise ValueError("an equation is needed, such as 'mk,kn->mn'")
        object.__setattr__(self, "equations", equations)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, names = tensors_in(op, named), tensor_arguments(op)
        ranks = tuple(tensors[name].ndim if name in tensors else None for name in names)
        return _labels_of_equations(self.equations, names, ranks, number_of_results(op))

    def misfit(self, op: OpOverload) -> str | None:
        names = tensor_arguments(op)
        wrong = next((e for e in self.equations if e.count(",") + 1 != len(names)), None)
        if wrong is None:
            return None
        return f"{wrong!r} has {wrong.count(',') + 1} operands, and the operator's tensors are {', '.join(names)}"


_TERM = re.compile(r"\+|\*?[A-Za-z]*")


@functools.lru_cache(maxsize=1024)
def _labels_of_equations(
    equations: tuple[str, ...], names: tuple[str, ...], ranks: tuple[int | None, ...], results: int
) -> Labels | None:
    return next((found for e in equations if (found := _labels_of(e, names, ranks, results))), None)


def _labels_of(equation: str, names: tuple[str, ...], ranks: tuple[int | None, ...], results: int) -> Labels | None:
    left, _, right = equation.partition("->")
    terms = left.split(",")
    operands: dict[str, tuple[Label, ...]] = {}
    batch = 0
    for name, term, rank in zip(names, terms, ranks, strict=True):
        letters = term.lstrip("*")
        if rank is None or term == ADDED:
            continue
        more = rank - len(letters)
        if more < 0 or (more > 0 and not term.startswith("*")):
            return None
        batch = max(batch, more)
        operands[name] = (*batch_labels(more), *letters)
    lead = batch_labels(batch) if right.startswith("*") else ()
    result: tuple[Label, ...] = (*lead, *right.lstrip("*"))
    for name, term, rank in zip(names, terms, ranks, strict=True):
        if term == ADDED and rank is not None:
            if rank > len(result):
                return None
            operands[name] = result[len(result) - rank :]
    contracted = {label for labels in operands.values() for label in labels} - set(result)
    added = tuple(name for name, term in zip(names, terms, strict=True) if term == ADDED and name in operands)
    return Labels(operands, (result,) * results, dict.fromkeys(contracted, "contracted"), added)


# --------------------------------------------------------------------------------------------------------------- slices


@dataclass(frozen=True)
class Slices(Dimensions):
    """An operator that works on each slice of its first operand by itself.

    gives             "one" result per slice (sum), one for "each" element (cumsum, softmax), or elements in order at
                      the "front" of the slice (sort)
    dim               the argument with the dimensions of a slice; without it (None, or no argument of this name), the
                      whole tensor is one slice
    keepdim           the argument that says whether reduced dimensions are kept with size 1
    positions         the indices of results that are positions in the slice
    number            the argument with the number of elements that a slice must have at least
    none_for_no_dims  whether an empty list of dimensions means none of them rather than all
    needs_elements    whether torch refuses an input without elements
    neutral           a number such that the operator, on a slice of nothing else, is finite and so are its derivatives:
                      slices that are valid as a whole or not at all then run torch's own kernel. None: they do not,
                      because it is slower than the rule
    own_memory        whether torch's kernel is wrong where a dimension has stride 0, so that it runs on a copy
    """

    gives: Literal["one", "each", "front"] = "one"
    dim: str | None = "dim"
    keepdim: str = "keepdim"
    positions: tuple[int, ...] = ()
    number: str | None = None
    none_for_no_dims: bool = False
    needs_elements: bool = False
    neutral: int | None = 0
    own_memory: bool = False

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        first = op._schema.arguments[0].name
        ndim = named[first].ndim
        dim = named.get(self.dim) if self.dim is not None else None
        listed = (dim,) if isinstance(dim, int) else dim
        every = listed is None or (len(listed) == 0 and not self.none_for_no_dims)
        over = range(-ndim, 0) if every else [d if d < 0 else d - ndim for d in listed or ()]
        if any(not -ndim <= d < 0 for d in over):
            return None  # of a 0-dim tensor, or out of range
        labels = batch_labels(ndim)
        roles: dict[Label, Role] = dict.fromkeys(over, "reduced" if self.gives == "one" else self.gives)
        result = labels
        if self.gives == "one":
            kept = bool(named.get(self.keepdim))
            result = tuple(None if d in roles else d for d in labels if kept or d not in roles)
        return Labels({first: labels}, (result,) * number_of_results(op), roles)

    def from_the_end(self, named: Mapping[str, Any]) -> dict[str, Any]:
        ndim, name = next(iter(named.values())).ndim, self.dim or ""
        dim = named.get(name)
        if isinstance(dim, int):
            return {**named, name: dim - ndim if dim >= 0 else dim}
        return dict(named) if dim is None else {**named, name: [d - ndim if d >= 0 else d for d in dim]}

    def misfit(self, op: OpOverload) -> str | None:
        return None  # Registration.arguments_of_slices, which knows what to write instead


@dataclass(frozen=True)
class LastDims(Dimensions):
    """Slices over the last dimensions of the first operand.

    count       how many: a number, or the argument whose length it is
    statistics  how many results, the last ones, are one for each slice, with dimensions of size 1

    The result has the first operand's dimensions, and a result for each element. Other tensors are parameters: their
    dimensions are the last ones of a slice.
    """

    count: int | str
    statistics: int = 0

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        tensors, first = tensors_in(op, named), op._schema.arguments[0].name
        count = self.count if isinstance(self.count, int) else len(named[self.count])
        if any(t.ndim < count if name == first else t.ndim > count for name, t in tensors.items()):
            return None
        operands = {name: batch_labels(t.ndim) for name, t in tensors.items()}
        roles: dict[Label, Role] = dict.fromkeys(batch_labels(count), "each")
        result = operands[first]
        statistic = tuple(None if label in roles else label for label in result)
        elements = number_of_results(op) - self.statistics
        return Labels(operands, (result,) * elements + (statistic,) * self.statistics, roles)

    def misfit(self, op: OpOverload) -> str | None:
        names = [a.name for a in op._schema.arguments]
        if isinstance(self.count, int) or self.count in names:
            return None
        return f"LastDims({self.count!r}): the operator's arguments are {', '.join(names)}"


# ----------------------------------------------------------------------------------------------------------------- rows


class _Rank:
    """What stands for a tensor where labels are asked for its rank alone."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


def row_reader(op: OpOverload, dims: Dimensions) -> Callable[..., int]:
    """A function of a call's positional arguments: how many last dimensions of the first tensor make up a row that the
    operator treats by itself, with a row of as many dimensions in the result; 0 if there is none.

    Dimensions that are counted from the front are none of a row's: stored rows have another number of them in front.
    """
    names, tensors = [a.name for a in op._schema.arguments], tensor_arguments(op)
    defaults = {a.name: a.default_value for a in op._schema.arguments}

    @functools.lru_cache(maxsize=256)
    def rows(key: tuple[Any, ...]) -> int:
        """`key`: the arguments, with the rank in place of each tensor."""
        named = defaults | dict(zip(names, key, strict=False))
        named |= {name: _Rank(rank) for name in tensors if (rank := named[name]) is not None}
        if isinstance(dims, Slices):
            over = named.get(dims.dim or "")
            if over is None or any(d >= 0 for d in ([over] if isinstance(over, int) else over)):
                return 0
        labels = dims.labels(op, named)
        if labels is None:
            return 0
        operand, (result, *_) = labels.operands[names[0]], labels.results
        row = labels.row_of(names[0])
        fits = 0 < row < len(operand) and len(result) == len(operand) and result[:-row] == operand[:-row]
        return row if fits else 0

    def read(*args: Any) -> int:
        return rows(tuple([a.ndim if isinstance(a, Tensor) else tuple(a) if type(a) is list else a for a in args]))

    return read
