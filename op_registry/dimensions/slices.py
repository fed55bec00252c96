"""Statements of operators that work on each slice of their first operand by itself; rows, for fast paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch._ops import OpOverload

from op_registry.dimensions.labels import (
    Dimension,
    Dimensions,
    Label,
    Labels,
    Role,
    atoms,
    batch_labels,
    counted_from_the_end,
    number_of_results,
    tensor_arguments,
    tensors_in,
)


@dataclass(frozen=True)
class Slices(Dimensions):
    """An operator that works on each slice of its first operand by itself.

    gives             "one" result per slice (sum), one for "each" element (cumsum, softmax), or elements in order at
                      the "front" of the slice (sort)
    dim               the argument with the dimensions of a slice; without it (None, or no argument of this name), the
                      whole tensor is one slice
    keepdim           the argument that says whether reduced dimensions are kept with size 1
    positions         the indices of results that are positions in the slice: a number below 0, or not below the size of
                      the slice, names none. None: it is not said whether integer results are
    number            the argument with the number of elements that a slice must have at least
    none_for_no_dims  whether an empty list of dimensions means none of them rather than all
    needs_elements    whether torch refuses an input without elements
    neutral           a number such that the operator, on a slice of nothing else, is finite and so are its derivatives:
                      slices that are valid as a whole or not at all then run torch's own kernel. None: they do not,
                      because it is slower than the rule
    own_memory        whether torch's kernel is wrong where a dimension has stride 0, so that it runs on a copy

    Other tensors (the levels of a quantile) have dimensions of their own, in front of the results'; a rule that is
    written with `over_slices` has none.
    """

    gives: Literal["one", "each", "front"] = "one"
    dim: str | None = "dim"
    keepdim: str = "keepdim"
    positions: tuple[int, ...] | None = None
    number: str | None = None
    none_for_no_dims: bool = False
    needs_elements: bool = False
    neutral: int | None = 0
    own_memory: bool = False

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        dim = named.get(self.dim) if self.dim is not None else None
        listed = (dim,) if isinstance(dim, int) else None if dim is None else tuple(dim)
        kept = self.gives == "one" and bool(named.get(self.keepdim))
        return _labels_of_slices(self, op, listed, kept, tuple((n, t.ndim) for n, t in tensors_in(op, named).items()))

    def from_the_end(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return counted_from_the_end(named, self.dim or "")

    # (misfit: Registration.arguments_of_slices, which knows what to write instead)
    def is_of_elements(self, op: OpOverload, result: int) -> bool:
        """Whether a result has the first operand's dimensions."""
        return self.gives != "one"

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

    needs = ("{count}",)

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        count = self.count if isinstance(self.count, int) else len(named[self.count])
        return _labels_of_last_dims(self, op, count, tuple((n, t.ndim) for n, t in tensors_in(op, named).items()))

    def is_of_elements(self, op: OpOverload, result: int) -> bool:
        """Whether a result has the first operand's dimensions; the first one always has."""
        return result < max(1, number_of_results(op) - self.statistics)

    def sizes_match(self, shape: Sequence[int], parameters: Iterable[Any], named: Mapping[str, Any]) -> bool:
        """Whether parameters, and the sizes that an argument lists, are those of a slice of a tensor of this shape."""
        sizes = [p.shape for p in parameters if p is not None]
        if isinstance(self.count, str):
            sizes.append(tuple(named[self.count]))
        return all(size and shape[-len(size) :] == size for size in sizes)

    def __str__(self) -> str:
        count = self.count if isinstance(self.count, int) else f"`{self.count}`"
        return f"a result for each element of a slice over the last {count} dimensions; those before are batch"

    def misfit(self, op: OpOverload) -> str | None:
        return None if isinstance(self.count, int) else super().misfit(op)


# The ranks of a call's tensors, by their names; the first is the operand that has slices.
Ranks = tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=4096)
def _labels_of_slices(
    stated: Slices, op: OpOverload, dims: tuple[int, ...] | None, kept: bool, ranks: Ranks
) -> Labels | None:
    (first, ndim), *parameters = ranks
    every = dims is None or (len(dims) == 0 and not stated.none_for_no_dims)
    over = range(-ndim, 0) if every else [d if d < 0 else d - ndim for d in dims or ()]
    if any(not -ndim <= d < 0 for d in over):
        return None  # of a 0-dim tensor, or out of range
    result = labels = batch_labels(ndim)
    roles: dict[Label, Role] = dict.fromkeys(over, "reduced" if stated.gives == "one" else stated.gives)
    if stated.gives == "one":
        result = tuple(None if d in roles else d for d in labels if kept or d not in roles)
    others: dict[str, tuple[Dimension, ...]] = {
        name: tuple(f"{name}.{n}" for n in range(rank)) for name, rank in parameters
    }
    lead: tuple[Dimension, ...] = tuple(label for dims in others.values() for label in dims)
    return Labels({first: labels} | others, ((*lead, *result),) * number_of_results(op), roles)


@functools.lru_cache(maxsize=4096)
def _labels_of_last_dims(stated: LastDims, op: OpOverload, count: int, ranks: Ranks) -> Labels | None:
    (_, ndim), *parameters = ranks
    if ndim < count or any(rank > count for _, rank in parameters):
        return None
    result = batch_labels(ndim)
    roles: dict[Label, Role] = dict.fromkeys(batch_labels(count), "each")
    statistic = tuple(None if label in roles else label for label in result)
    results = tuple(result if stated.is_of_elements(op, n) else statistic for n in range(number_of_results(op)))
    return Labels({name: batch_labels(rank) for name, rank in ranks}, results, roles)


# ---------------------------------------------------------------------------------------------------------------- rows


class _Rank:
    """Stands for a tensor when only its rank is needed, to compute labels."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


def row_reader(op: OpOverload, dims: Dimensions) -> Callable[..., int]:
    """A function of a call: how many last dimensions of the first tensor make up a row; 0 if it has no rows.

    It gets the number of dimensions of the first tensor, and of the tensor that lists its rows (the same, if it is
    stored densely); and the other arguments, with its number of dimensions in place of each tensor, and tuples.

    The operator processes each row independently, and gives a row with as many dimensions in the result. Dimensions
    that are counted from the front cannot belong to a row, because stored rows have another number of dimensions in
    front. Both tensors need to have the rows: mm takes (n, D), and not (B, T, D).
    """
    names, tensors = [a.name for a in op._schema.arguments], tensor_arguments(op)
    defaults = {a.name: a.default_value for a in op._schema.arguments}

    @functools.lru_cache(maxsize=256)
    def rows(shown: int, listed: int, *rest: Any) -> int:
        if listed != shown and not rows(shown, shown, *rest):
            return 0
        named = defaults | dict(zip(names, (listed, *rest), strict=False))
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

    return rows
