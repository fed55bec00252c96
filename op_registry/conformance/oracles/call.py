"""A call as oracles see it: each tensor with a bool mask of its full shape, each argument by its schema name.

Oracles compute the expected result of an operator in the simplest way, however slow: loops over slices without their
invalid elements, explicit products, lookups by index. They share no code with the rules. They are written in
differentiable torch, so the gradient of an oracle is the expected gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.trees import tree_leaves, tree_map


class NoOracle(Exception):
    """No independent computation of this operator's result exists; the message is the operator's name."""


class Refused(Exception):
    """The semantics refuse the operator on this input: the library must raise MaskedSemanticsError."""


class OracleFailed(Exception):
    """An oracle raised an error; the message says which oracle, and which error."""


class Misdeclared(Exception):
    """The operator does not follow the law of the category under which it is registered; the message says how."""


@dataclass(frozen=True)
class Expected:
    """An operand or expected result: data, its mask (bool, of the full shape), and whether it is a masked tensor."""

    data: Tensor
    mask: Tensor
    masked: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def filled(self, value: float) -> Tensor:
        return torch.where(self.mask, self.data, torch.as_tensor(value).to(self.data))

    def map(self, move: Callable[[Tensor], Tensor]) -> Expected:
        """`move` applied to data and mask."""
        return Expected(move(self.data), move(self.mask))

    @property
    def all_valid(self) -> bool:
        return bool(self.mask.all())


def all_true(data: Tensor) -> Tensor:
    return torch.ones(data.shape, dtype=torch.bool)


def valid(data: Tensor) -> Expected:
    """A masked result whose every element is valid."""
    return Expected(data, all_true(data))


def invalid(data: Tensor) -> Expected:
    """A masked result of which nothing is valid."""
    return Expected(data, ~all_true(data))


def all_outputs_valid(result: object) -> Any:
    """Every tensor of a result as a masked one whose every element is valid."""
    return tree_map(lambda out: valid(out) if isinstance(out, Tensor) else out, result)


def data_of(operand: Expected) -> Tensor:
    return operand.data


@dataclass(frozen=True)
class Call:
    """One operator call: ``c["dim"]`` is an argument by its schema name, with the schema's default."""

    op: OpOverload
    bound: dict[str, Any]
    # The values after the call of arguments that the operator writes to and does not return, by name.
    updates: dict[str, Expected] = field(default_factory=dict)

    @classmethod
    def of(cls, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
        bound: dict[str, Any] = {}
        for position, argument in enumerate(op._schema.arguments):
            if argument.name in kwargs:
                bound[argument.name] = kwargs[argument.name]
            elif not argument.kwarg_only and position < len(args):
                bound[argument.name] = args[position]
            else:
                bound[argument.name] = argument.default_value
        return cls(op, bound)

    @property
    def name(self) -> str:
        return str(self.op._schema.name).removeprefix("aten::")

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def __contains__(self, name: str) -> bool:
        return name in self.bound

    def get(self, name: str, default: object = None) -> Any:
        return self.bound.get(name, default)

    def dims(self, ndim: int, name: str = "dim") -> tuple[int, ...]:
        """The dimensions in a `dim` argument, non-negative; all dimensions for None, () or a missing argument."""
        dim = self.bound.get(name)
        if dim is None or (not isinstance(dim, int) and len(dim) == 0):
            return tuple(range(ndim))
        return tuple(d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)) if ndim else ()

    def operands(self) -> list[Expected]:
        """Every tensor argument, including those in lists."""
        return [leaf for leaf in tree_leaves(list(self.bound.values())) if isinstance(leaf, Expected)]

    def plain(self, /, **changes: object) -> Any:
        """Plain torch's result for the operands' data, with some arguments changed."""
        return self.run(changes, data_of)

    def run(self, changes: Mapping[str, object], view: Callable[[Expected], Tensor]) -> Any:
        """Plain torch's result for `view` of each operand, with some arguments changed."""
        bound = {**self.bound, **changes}
        values = tree_map(lambda leaf: view(leaf) if isinstance(leaf, Expected) else leaf, bound)
        args, kwargs = [], {}
        for argument in self.op._schema.arguments:
            if argument.kwarg_only:
                kwargs[argument.name] = values[argument.name]
            else:
                args.append(values[argument.name])
        return self.op(*args, **kwargs)


Oracle = Callable[[Call], Any]
TABLE: dict[str, Oracle] = {}


def oracle(*names: str) -> Callable[[Oracle], Oracle]:
    """Decorator: the function is the oracle of these operators.

    names  aten names, for all overloads or for one (``scatter.src``); a string may have several, separated by spaces
    """

    def register(function: Oracle) -> Oracle:
        for name in " ".join(names).split():
            if name in TABLE:
                raise ValueError(f"{name} has an oracle already")
            TABLE[name] = function
        return function

    return register


def broadcast_valid(shape: Sequence[int], operands: Sequence[Expected]) -> Tensor:
    """Where every operand, broadcast to `shape`, is valid."""
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    for operand in operands:
        mask = mask & operand.mask.expand(mask.shape)
    return mask
