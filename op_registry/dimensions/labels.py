"""Labels of the dimensions of one call, and what a statement of dimensions is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch._ops import OpOverload

from op_registry.dimensions.sizes import known_to_hold

# A letter of an equation, or another name; a negative number for a dimension that broadcasts, counted from the last one
# of those; None for a dimension of size 1 that an operator makes or keeps.
Label = str | int | None
# A dimension: a label, or those that it is merged of, outermost first.
Dimension = Label | tuple[Label, ...]
# What an operator does along a label that is not batch: it sums products over it (contracted); one result takes the
# place of all its elements (reduced); each element has a result (each); results come in order at the front (front); it
# goes step by step (scanned); it reads windows (window); it moves elements (moved), takes some of them (selected), puts
# operands one behind the other (joined), reads or writes at computed positions (indexed), does with each what its index
# says (counted). `new`: no operand has it; `parameter`: results may depend on all of it.
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
    "counted",
    "new",
    "parameter",
]


def atoms(dimension: Dimension) -> tuple[Label, ...]:
    """The labels that a dimension has."""
    return dimension if isinstance(dimension, tuple) else (dimension,)


TO_THE_END = 2**62


@dataclass(frozen=True)
class Part:
    """The part of a dimension that a result shows, with bounds as the caller wrote them: negative ones from the end.

    kept  whether the dimension is kept; otherwise the result shows the index `start`
    """

    label: Label
    start: int = 0
    stop: int = TO_THE_END
    step: int = 1
    kept: bool = True

    @property
    def left_out(self) -> int:
        """How many positions it leaves out, in front and by a bound from the end."""
        front = 0 if known_to_hold(self.start < 0) else self.start
        return front + (-self.stop if self.ends_early else 0)

    @property
    def ends_early(self) -> bool:
        """Whether it leaves out positions at the end."""
        return known_to_hold(self.stop < 0)

    def of(self, size: int) -> slice:
        """The part of a dimension of this size, without negative bounds."""
        start, stop = _bound(self.start, size), _bound(self.stop, size)
        return slice(start, start if known_to_hold(stop < start) else stop, self.step)

    def is_whole(self, size: int) -> bool:
        """Whether it shows each index of a dimension of this size, in order."""
        if not self.kept:
            return False
        part = self.of(size)
        all_of_it = known_to_hold(part.start == 0) and known_to_hold(part.stop == size)
        return all_of_it and (self.step == 1 or known_to_hold(size == 1))

    def written(self, dim: int) -> str:
        """The part as code, of dimension `dim`."""
        bound = "" if self.stop >= TO_THE_END else self.stop
        inside = f"{self.start or ''}:{bound}{'' if self.step == 1 else f':{self.step}'}" if self.kept else self.start
        return f"x[{':, ' * dim}{inside}]"


def _bound(bound: int, size: int) -> int:
    """A bound of a slice, counted from the front; sizes of graphs are compared as torch's own slices compare them."""
    if known_to_hold(bound < 0):
        return 0 if known_to_hold(bound + size <= 0) else bound + size
    return size if bound is TO_THE_END or known_to_hold(bound >= size) else bound


@dataclass(frozen=True)
class Window:
    """Windows along a dimension, each of which lies in it: the number of indices from one to the next, and of one."""

    size: int
    step: int = 1

    def count(self, length: int) -> int:
        """How many windows lie in so many positions."""
        return (length - self.size) // self.step + 1


@dataclass(frozen=True)
class Labels:
    """The dimensions of one call.

    operands  the dimensions of each tensor argument, by its name; ``tensors[1]`` is the second of a list
    results   those of each result
    roles     the role of each label that is not batch
    sizes     the sizes of labels that are parts of merged dimensions, where no tensor has them alone
    added     the operands that are added to a contraction
    cuts      of each result, the parts of dimensions that it shows, the last dimension first
    moves     the labels along which elements change places, in order: each by how many further, round the end; None:
              their order is reversed
    windows   the windows along a label, where each lies in the dimension
    counts    the labels whose indices an argument counts, by its name: an index, a class, ``is_causal``
    """

    operands: Mapping[str, tuple[Dimension, ...]]
    results: tuple[tuple[Dimension, ...], ...]
    roles: Mapping[Label, Role] = field(default_factory=dict)
    sizes: Mapping[Label, int] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    cuts: tuple[tuple[Part, ...], ...] = ()
    moves: tuple[tuple[Label, int | None], ...] = ()
    windows: Mapping[Label, Window] = field(default_factory=dict)
    counts: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)

    @functools.cached_property
    def is_sum_of_products(self) -> bool:
        """Whether the operator is what einsum computes: no dimension is merged, and each is contracted or batch."""
        merged = any(isinstance(dim, tuple) for dims in self.operands.values() for dim in dims)
        return not merged and set(self.roles.values()) <= {"contracted"}

    def role_of(self, dimension: Dimension) -> Role | None:
        """What the operator does along a dimension, or along a part of it; None if all of it is batch."""
        return next((self.roles[label] for label in atoms(dimension) if label in self.roles), None)

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
    """A statement of an operator's dimensions; its kinds are the classes below.

    words  the statement in words
    needs  the arguments that the operator has to have

    In both, ``{dim}`` stands for the value of the statement's field `dim`; an argument that it names is needed.
    """

    words: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels | None:
        """The labels of a call, whose arguments are given by name; None if the statement does not fit the call.

        Tensors may be records or anything else that has `ndim`, and `shape` where labels depend on sizes.
        """
        raise NotImplementedError

    def from_the_end(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """The same arguments with dimensions counted from the last one, so that they hold for stored rows as well."""
        return dict(named)

    def misfit(self, op: OpOverload) -> str | None:
        """Why no call of the overload can be as stated; None if it can."""
        names = [a.name for a in op._schema.arguments]
        needed = [name.format_map(vars(self)) for name in self.needs]
        missing = [name for name in needed if name.isidentifier() and name not in (*names, "None")]
        if not missing:
            return None
        given = [(name, value) for name, value in vars(self).items() if value != getattr(type(self), name, None)]
        first = next(iter(vars(self)), None)
        written = ", ".join(repr(value) if name == first else f"{name}={value!r}" for name, value in given)
        statement = f"{type(self).__name__}({written})"
        return f"{statement}: the operator has no {' and '.join(missing)}; its arguments are {', '.join(names)}"

    def __str__(self) -> str:
        """The statement in words, as `explain` prints it."""
        return self.words.format_map(vars(self))


def counted_from_the_end(named: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Arguments with the dimensions in one of them counted from the last of the first tensor."""
    ndim, dim = next(iter(named.values())).ndim, named.get(name)
    if isinstance(dim, int):
        return {**named, name: dim - ndim if dim >= 0 else dim}
    return dict(named) if dim is None else {**named, name: [d - ndim if d >= 0 else d for d in dim]}


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
        if value is None:
            continue
        if isinstance(value, (list, tuple)):
            found |= {f"{name}[{n}]": tensor for n, tensor in enumerate(value) if tensor is not None}
        elif hasattr(value, "ndim"):  # torch also takes a number in place of a tensor
            found[name] = value
    return found


@functools.lru_cache(maxsize=4096)
def number_of_results(op: OpOverload) -> int:
    return len(op._schema.returns)


def batch_labels(ndim: int) -> tuple[Label, ...]:
    """Labels of dimensions that broadcast: the last one is -1."""
    return tuple(range(-ndim, 0))


@dataclass(frozen=True)
class Elementwise(Dimensions):
    """Operands broadcast; every dimension is batch."""

    words = "every dimension is batch"

    def labels(self, op: OpOverload, named: Mapping[str, Any]) -> Labels:
        tensors = tensors_in(op, named)
        result = batch_labels(max((t.ndim for t in tensors.values()), default=0))
        operands = {name: batch_labels(t.ndim) for name, t in tensors.items()}
        return Labels(operands, (result,) * number_of_results(op))
