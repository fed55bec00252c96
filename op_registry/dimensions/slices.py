"""Statements of operators that work on each slice of their first operand by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch._ops import OpOverload

from op_registry.dimensions.labels import (
    Dimension,
    Dimensions,
    Label,
    Labels,
    Role,
    batch_labels,
    counted_from_the_end,
    number_of_results,
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
        return Labels(
            operands, tuple(result if self.is_of_elements(op, n) else statistic for n in range(number)), roles
        )

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
