"""Statements by equations, as in einsum: contractions, and whatever works along dimensions with names of their own."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch._ops import OpOverload

from op_registry.dimensions.labels import (
    Dimension,
    Dimensions,
    Label,
    Labels,
    Role,
    atoms,
    batch_labels,
    tensor_arguments,
    tensors_in,
)

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
    merged dimensions, and `counts` the arguments that count indices, with the letters of these; the other keywords are
    roles, with the letters that have them::

        Equation("*(gc)x,(go)ci,(go)->*(go)x", window="x", sizes={"g": "groups"})
        Equation("nc,n->n", counts={"target": "c"})

    Raises ValueError for a text that is none.
    """

    equations: tuple[str, ...]
    sizes: tuple[tuple[str, str | int], ...]
    roles: tuple[tuple[Role, str], ...]
    counts: tuple[tuple[str, str], ...]

    def __init__(
        self,
        *equations: str,
        sizes: Mapping[str, str | int] | None = None,
        counts: Mapping[str, str] | None = None,
        **roles: str,
    ) -> None:
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
        object.__setattr__(self, "counts", tuple((counts or {}).items()))

    def __str__(self) -> str:
        left, _, right = self.equations[0].partition("->")
        roles: dict[str, Role] = {letter: role for role, letters in self.roles for letter in letters}
        by_role: dict[str, list[str]] = {}
        for a in dict.fromkeys(re.findall("[A-Za-z*]", f"{left}{right}")):
            inferred = "contracted" if a not in right else "each" if a.isupper() else "batch"
            by_role.setdefault(roles.get(a, inferred), []).append(a)
        return "; ".join([", or ".join(self.equations), *(f"{role} {', '.join(a)}" for role, a in by_role.items())])

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        names = tensor_arguments(op, lists=True)
        fitting = _labels_of_equations(self, names, tuple([_ranks(named.get(name)) for name in names]))
        if not fitting:
            return None
        found = fitting[-1]
        if len(fitting) > 1:
            found = next((f for f in fitting[:-1] if _sizes_agree(f, tensors_in(op, named))), found)
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
def _labels_of_equations(stated: Equation, names: tuple[str, ...], given: tuple[Ranks, ...]) -> list[Labels]:
    fitting, ranks = [], tuple(zip(names, given, strict=True))
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
            single: list[Any] = [e for e in each if e[0] in terms]
            found = _labels_of(single + listed, right.split(","), roles, stated.counts)
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
    terms: Sequence[tuple[str, str, int | None]],
    results: Sequence[str],
    roles: Mapping[Label, Role],
    counts: Sequence[tuple[str, str]],
) -> Labels | None:
    given = [(name, term, rank) for name, term, rank in terms if rank is not None]
    batch = _batch_dimensions(given)
    if batch is None:
        return None
    outcomes = tuple(_dimensions(term, batch) for term in results)
    operands: dict[str, tuple[Dimension, ...]] = {}
    parameters: list[Label] = []
    for name, term, rank in given:
        if term == PARAMETER:
            operands[name] = own = tuple(f"{name}.{n}" for n in range(rank))
            parameters += own
        elif term == ADDED:
            if rank > len(outcomes[0]):
                return None
            operands[name] = outcomes[0][len(outcomes[0]) - rank :]
        else:
            operands[name] = _dimensions(term, rank - _dimensions_named(term))
    stated = {a: role for a, role in roles.items() if a != "*"}
    if "*" in roles:
        stated |= dict.fromkeys(batch_labels(batch), roles["*"])
    every, kept = (
        {a for dims in of for dim in dims for a in atoms(dim)} for of in ((*operands.values(), *outcomes), outcomes)
    )
    inferred: dict[Label, Role] = {a: "contracted" if a not in kept else "each" for a in every if _mixes(a, kept)}
    inferred |= dict.fromkeys(parameters, "parameter")
    added = tuple(name for name, term, _ in given if term == ADDED)
    found = inferred | {a: role for a, role in stated.items() if a in every}
    return Labels(operands, outcomes, found, added=added, counts={name: (*labels,) for name, labels in counts})


def _batch_dimensions(terms: Sequence[tuple[str, str, int]]) -> int | None:
    """How many dimensions a star stands for, in the operand that has most; None if the ranks fit no term."""
    batch, starred = 0, set()
    for _, term, rank in terms:
        if term in (ADDED, PARAMETER):
            continue
        more = rank - _dimensions_named(term)
        if more < 0 or (more > 0 and "*" not in term):
            return None
        batch = max(batch, more)
        starred |= {more} if "*" in term[1:] else set()
    return batch if starred <= {batch} else None


def _mixes(label: Label, kept: Collection[Label]) -> bool:
    return label is not None and (label not in kept or (isinstance(label, str) and label.isupper()))


def _dimensions_named(term: str) -> int:
    """How many dimensions a term has without those that its star stands for."""
    return len([d for d in _DIMENSION.findall(term) if d != "*"])


def _dimensions(term: str, batch: int) -> tuple[Dimension, ...]:
    """The dimensions of a term whose star stands for `batch` of them."""
    found: list[Dimension] = []
    for d in _DIMENSION.findall(term):
        found += batch_labels(batch) if d == "*" else [None if d == "1" else tuple(d[1:-1]) if len(d) > 1 else d]
    return tuple(found)
