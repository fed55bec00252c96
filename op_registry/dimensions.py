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
as a whole or not at all, the oracles of operators of other libraries, and the text of a refusal. A statement is true of
plain torch, which the law "dims" of conformance asks (:mod:`op_registry.conformance.stated_dims`).

Movements, joins, windows, lookups and losses are in movements.py, views in views.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor
from torch._ops import OpOverload

# A letter of an equation, or another name; a negative number for a dimension that broadcasts, counted from the last one
# of those; None for a dimension of size 1 that an operator makes or keeps.
Label = str | int | None
# A dimension: a label, or those that it is merged of, outermost first.
Dimension = Label | tuple[Label, ...]
# What an operator does along a label that is not batch: it sums products over it (contracted); one result takes the
# place of all its elements (reduced); each element has a result (each); results come in order at the front (front); it
# goes step by step (scanned); it reads windows (window); it moves elements (moved), takes some of them (selected), puts
# operands one behind the other (joined), reads or writes at computed positions (indexed). `new`: no operand has it;
# `parameter`: results may depend on all of it.
Role = Literal[
    "contracted",
    "reduced",
    "each",
    "front",
    "scanned",
    "window",
    "moved",
    "selected",
    "joined",
    "indexed",
    "new",
    "parameter",
]


def atoms(dimension: Dimension) -> tuple[Label, ...]:
    """The labels that a dimension has."""
    return dimension if isinstance(dimension, tuple) else (dimension,)


@dataclass(frozen=True)
class Labels:
    """The dimensions of one call.

    operands  the dimensions of each tensor argument, by its name; ``tensors[1]`` is the second of a list
    results   those of each result
    roles     the role of each label that is not batch
    sizes     the sizes of labels that are parts of merged dimensions, where no tensor has them alone
    """

    operands: Mapping[str, tuple[Dimension, ...]]
    results: tuple[tuple[Dimension, ...], ...]
    roles: Mapping[Label, Role] = field(default_factory=dict)
    sizes: Mapping[Label, int] = field(default_factory=dict)

    def belongs_to(self, first: str, name: str) -> bool:
        """Whether every dimension of an operand is one of the first operand's, as a parameter's are; a number's are."""
        return set(self.operands.get(name, ())) <= set(self.operands[first])

    def row_of(self, name: str) -> int:
        """How many last dimensions of the operand make up a row that the operator processes independently.

        The operator only works along these dimensions, and other operands have no others. All dimensions if there is no
        smaller row.
        """
        labels = self.operands[name]
        shared = {a for other, dims in self.operands.items() if other != name for dim in dims for a in atoms(dim)}
        inner = [n for n, dim in enumerate(labels) if any(a in self.roles or a in shared for a in atoms(dim))]
        return len(labels) - min(inner, default=len(labels))


class Dimensions:
    """A statement of an operator's dimensions; its kinds are the classes below."""

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        """The labels of a call, whose arguments are given by name; None if the statement does not fit the call.

        Tensors may be records or anything else that has `ndim`, and `shape` where labels depend on sizes.
        """
        raise NotImplementedError

    def misfit(self, op: OpOverload) -> str | None:
        """Why no call of the overload can be as stated; None if it can."""
        return None

    def __str__(self) -> str:
        """The statement in words, as `explain` prints it."""
        raise NotImplementedError


_ONE = ("Tensor", "Optional[Tensor]")
_SEVERAL = ("List[Tensor]", "List[Optional[Tensor]]")


@functools.lru_cache(maxsize=4096)
def tensor_arguments(op: OpOverload, lists: bool = False) -> tuple[str, ...]:
    """The names of the arguments that are one tensor, or an optional one; with `lists`, also those that are several."""
    kinds = (*_ONE, *_SEVERAL) if lists else _ONE
    return tuple(a.name for a in op._schema.arguments if str(a.type) in kinds)


def tensors_in(op: OpOverload, named: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a call by name, and those of lists: ``tensors[1]``."""
    found: dict[str, Any] = {}
    for name in tensor_arguments(op, lists=True):
        value = named.get(name)
        if isinstance(value, (list, tuple)):
            found |= {f"{name}[{n}]": tensor for n, tensor in enumerate(value) if tensor is not None}
        elif hasattr(value, "ndim"):  # torch also takes a number in place of a tensor
            found[name] = value
    return found


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

    def __str__(self) -> str:
        return "every dimension is batch"


# --------------------------------------------------------------------------------------------------------- contractions

ADDED, PARAMETER = "+", "?"


@dataclass(frozen=True, init=False)
class Equation(Dimensions):
    """An equation as in einsum, one term for each tensor argument in the order of the schema, and for each result.

    A letter that no result has is contracted. In a term stand

    *        any number of dimensions, which broadcast; after a letter, the same number in every term that has it
    A        a letter in upper case, along which each result depends on the whole slice; a result may have it alone
    (gc)     one dimension that is merged of several
    1        a dimension of size 1
    +        alone: an operand that is added, elementwise with the first result
    ?        alone: a parameter (or a list of them), on all of which results may depend

    A list of tensors has one term, for each of them. Of several equations, the first holds that fits the ranks of the
    operands and, where several do, their sizes. `sizes` has the arguments (or numbers) that are sizes of parts of
    merged dimensions; the other keywords are roles, with the letters that have them::

        Equation("*(gc)x,(go)ci,(go)->*(go)x", window="x", sizes={"g": "groups"})

    Raises ValueError for a text that is none.
    """

    equations: tuple[str, ...]
    sizes: tuple[tuple[str, str | int], ...]
    roles: tuple[tuple[Role, str], ...]

    def __init__(self, *equations: str, sizes: Mapping[str, str | int] | None = None, **roles: str) -> None:
        for equation in equations:
            left, arrow, right = equation.partition("->")
            terms = left.split(",")
            if not arrow or not all(_TERM.fullmatch(term) for term in equation.replace("->", ",").split(",")):
                raise ValueError(f"{equation!r} is no equation such as 'mk,kn->mn' or '*k,nk,+->*n'")
            if any(term in (ADDED, PARAMETER) for term in right.split(",")):
                raise ValueError(f"{equation!r} is no equation: a result has dimensions of its own")
            free = {"*", "(", ")", "1", ",", *"".join(terms), *"".join(roles.values())}
            unknown = sorted(letter for letter in set(right) - free if not letter.isupper())
            if unknown:
                raise ValueError(f"{equation!r}: no operand has {', '.join(unknown)}")
        if not equations:
            raise ValueError("an equation is needed, such as 'mk,kn->mn'")
        object.__setattr__(self, "equations", equations)
        object.__setattr__(self, "sizes", tuple((sizes or {}).items()))
        object.__setattr__(self, "roles", tuple(roles.items()))

    def __str__(self) -> str:
        left, _, right = self.equations[0].partition("->")
        roles: dict[str, Role] = {letter: role for role, letters in self.roles for letter in letters}
        by_role: dict[str, list[str]] = {}
        for a in dict.fromkeys(re.findall("[A-Za-z*]", f"{left}{right}")):
            inferred = "contracted" if a not in right else "each" if a.isupper() else "batch"
            by_role.setdefault(roles.get(a, inferred), []).append(a)
        return "; ".join([", or ".join(self.equations), *(f"{role} {', '.join(a)}" for role, a in by_role.items())])

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        ranks = tuple((name, _ranks(named.get(name))) for name in tensor_arguments(op, lists=True))
        fitting = _labels_of_equations(self, ranks)
        if not fitting:
            return None
        found = next((f for f in fitting[:-1] if _sizes_agree(f, tensors_in(op, named))), fitting[-1])
        if not self.sizes:
            return found
        return replace(found, sizes={k: named[v] if isinstance(v, str) else v for k, v in self.sizes})

    def misfit(self, op: OpOverload) -> str | None:
        names = tensor_arguments(op, lists=True)
        if any(e.partition("->")[0].count(",") + 1 == len(names) for e in self.equations):
            return None
        first = self.equations[0]
        number = first.partition("->")[0].count(",") + 1
        return f"{first!r} has {number} operands, and the operator's tensors are {', '.join(names)}"


_TERM = re.compile(r"[+?]|(?:[A-Za-z1*]|\([A-Za-z]+\))*")
_DIMENSION = re.compile(r"\*|[A-Za-z1]|\([A-Za-z]+\)")
# The rank of an operand, those of a list of them, None for an optional one that is missing.
Ranks = int | tuple[int | None, ...] | None


def _ranks(value: Any) -> Ranks:
    if isinstance(value, (list, tuple)):
        return tuple(None if item is None else item.ndim for item in value)
    return getattr(value, "ndim", None)


@functools.lru_cache(maxsize=1024)
def _labels_of_equations(stated: Equation, ranks: tuple[tuple[str, Ranks], ...]) -> list[Labels]:
    fitting = []
    terms = {name: rank for name, rank in ranks if not isinstance(rank, tuple)}
    roles: dict[Label, Role] = {letter: role for role, letters in stated.roles for letter in letters}
    for equation in stated.equations:
        left, _, right = equation.partition("->")
        if left.count(",") + 1 == len(ranks):
            each = [(name, term, rank) for (name, rank), term in zip(ranks, left.split(","), strict=True)]
            listed = [
                (f"{name}[{n}]", term, one)
                for name, term, rank in each
                for n, one in enumerate(rank if isinstance(rank, tuple) else ())
            ]
            found = _labels_of([e for e in each if e[0] in terms] + listed, right.split(","), roles)  # type: ignore[arg-type]
            if found is not None:
                fitting.append(found)
    return fitting


def _sizes_agree(labels: Labels, tensors: Mapping[str, Any]) -> bool:
    """Whether dimensions with one letter have one size; True where sizes are not known."""
    sizes: dict[Label, set[int]] = {}
    for name, tensor in tensors.items():
        for dim, size in zip(labels.operands[name], getattr(tensor, "shape", ()), strict=False):
            if isinstance(dim, str) or dim is None:
                sizes.setdefault(dim, {1} if dim is None else set()).add(size)
    return all(len(found) == 1 for found in sizes.values())


def _labels_of(
    terms: Sequence[tuple[str, str, int | None]], results: Sequence[str], roles: Mapping[Label, Role]
) -> Labels | None:
    stated, starred = dict(roles), set()
    batch = 0
    for _, term, rank in terms:
        if rank is None or term in (ADDED, PARAMETER):
            continue
        more = rank - len([d for d in _DIMENSION.findall(term) if d != "*"])
        if more < 0 or (more > 0 and "*" not in term):
            return None
        batch = max(batch, more)
        starred |= {more} if "*" in term[1:] else set()
    if len(starred) > 1 or (starred and starred != {batch}):
        return None
    outcomes = tuple(_dimensions(term, batch) for term in results)
    operands: dict[str, tuple[Dimension, ...]] = {}
    for name, term, rank in terms:
        if rank is None:
            continue
        if term == PARAMETER:
            operands[name] = tuple(f"{name}.{n}" for n in range(rank))
        elif term == ADDED:
            if rank > len(outcomes[0]):
                return None
            operands[name] = outcomes[0][len(outcomes[0]) - rank :]
        else:
            letters = len([d for d in _DIMENSION.findall(term) if d != "*"])
            operands[name] = _dimensions(term, rank - letters)
    if "*" in stated:
        role = stated.pop("*")
        stated |= dict.fromkeys(batch_labels(batch), role)
    every = {a for dims in (*operands.values(), *outcomes) for dim in dims for a in atoms(dim)}
    kept = {a for dims in outcomes for dim in dims for a in atoms(dim)}
    inferred: dict[Label, Role] = {a: "contracted" if a not in kept else "each" for a in every if _mixes(a, kept)}
    for name, term, rank in terms:
        if term == PARAMETER:
            inferred |= dict.fromkeys([f"{name}.{n}" for n in range(rank or 0)], "parameter")
    return Labels(operands, outcomes, inferred | {a: role for a, role in stated.items() if a in every})


def _mixes(label: Label, kept: Collection[Label]) -> bool:
    return label is not None and (label not in kept or (isinstance(label, str) and label.isupper()))


def _dimensions(term: str, batch: int) -> tuple[Dimension, ...]:
    """The dimensions of a term whose star stands for `batch` of them."""
    found: list[Dimension] = []
    for d in _DIMENSION.findall(term):
        found += batch_labels(batch) if d == "*" else [None if d == "1" else tuple(d[1:-1]) if len(d) > 1 else d]
    return tuple(found)


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

    Other tensors (the levels of a quantile) have dimensions of their own, in front of the results'.
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
        others: dict[str, tuple[Dimension, ...]] = {
            name: tuple(f"{name}.{n}" for n in range(t.ndim))
            for name, t in tensors_in(op, named).items()
            if name != first
        }
        lead: tuple[Dimension, ...] = tuple(label for dims in others.values() for label in dims)
        return Labels({first: labels} | others, ((*lead, *result),) * number_of_results(op), roles)

    def is_of_elements(self, op: OpOverload, result: int) -> bool:
        """Whether a result has the first operand's dimensions."""
        return self.gives != "one"

    # (misfit: Registration.arguments_of_slices, which knows what to write instead)
    def __str__(self) -> str:
        along = "the whole tensor" if self.dim is None else f"each slice along `{self.dim}`"
        given = {"one": "one result for", "each": "a result for each element of", "front": "elements in order, of"}
        return f"{given[self.gives]} {along}; other dimensions are batch"


@dataclass(frozen=True)
class LastDims(Dimensions):
    """Slices over the last dimensions of the first operand.

    count       the number of these dimensions, or the argument whose length is this number
    statistics  how many of the last results hold one value for each slice, with dimensions of size 1

    The other results have the first operand's dimensions, and a value for each element. Other tensors are parameters,
    whose dimensions are the last dimensions of a slice.
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
        number = number_of_results(op)
        results = tuple(result if self.is_of_elements(op, n) else statistic for n in range(number))
        return Labels(operands, results, roles)

    def is_of_elements(self, op: OpOverload, result: int) -> bool:
        """Whether a result has the first operand's dimensions; the first one always has."""
        return result < max(1, number_of_results(op) - self.statistics)

    def sizes_match(self, op: OpOverload, named: Mapping[str, Any]) -> bool:
        """Whether parameters, and the sizes that an argument lists, are those of a slice of the first operand."""
        first, *parameters = tensors_in(op, named).values()
        sizes = [tuple(p.shape) for p in parameters]
        if isinstance(self.count, str):
            sizes.append(tuple(named[self.count]))
        return all(size and len(size) <= first.ndim and tuple(first.shape[-len(size) :]) == size for size in sizes)

    def __str__(self) -> str:
        count = self.count if isinstance(self.count, int) else f"`{self.count}`"
        return f"a result for each element of a slice over the last {count} dimensions; those before are batch"

    def misfit(self, op: OpOverload) -> str | None:
        names = [a.name for a in op._schema.arguments]
        if isinstance(self.count, int) or self.count in names:
            return None
        return f"LastDims({self.count!r}): the operator's arguments are {', '.join(names)}"


# ----------------------------------------------------------------------------------------------------------------- rows


class _Rank:
    """Stands for a tensor when only its rank is needed, to compute labels."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


def row_reader(op: OpOverload, dims: Dimensions) -> Callable[..., int]:
    """A function of a call's positional arguments: how many last dimensions of the first tensor make up a row.

    The operator processes each row independently, and gives a row with as many dimensions in the result; 0 if it has no
    such rows. Dimensions that are counted from the front cannot belong to a row, because stored rows have another
    number of dimensions in front.
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
        if any(labels.roles.get(a) == "window" for dim in operand[len(operand) - row :] for a in atoms(dim)):
            return 0  # a window that lies in zeros around the row has a result, whatever the row holds
        fits = 0 < row < len(operand) and len(result) == len(operand) and result[:-row] == operand[:-row]
        return row if fits else 0

    def read(*args: Any) -> int:
        return rows(tuple([a.ndim if isinstance(a, Tensor) else tuple(a) if type(a) is list else a for a in args]))

    return read
