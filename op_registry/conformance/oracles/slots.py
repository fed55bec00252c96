"""What an oracle sees of a call: each tensor with a bool mask of its full shape, each argument under its schema name.

Oracles say what an operator has to give, in the slowest and plainest way there is: loops over compressed slices,
explicit products, look-ups by position. They share no code with the rules. What they write in plain torch is
differentiable, so the gradient of an oracle is the gradient that is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.trees import tree_leaves, tree_map


class NoOracle(Exception):
    """Nothing independent says what this operator has to give; its name is the message."""


class Refused(Exception):
    """The semantics page refuses the operator on this input: the library has to raise MaskedSemanticsError."""


@dataclass(frozen=True)
class Slot:
    """A tensor, where it is valid (bool, of its full shape), and whether it came as a masked tensor at all."""

    data: Tensor
    mask: Tensor
    masked: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def filled(self, value: Any) -> Tensor:
        return torch.where(self.mask, self.data, torch.as_tensor(value).to(self.data))

    @property
    def all_valid(self) -> bool:
        return bool(self.mask.all())


def all_true(data: Tensor) -> Tensor:
    return torch.ones(data.shape, dtype=torch.bool)


def valid(data: Tensor) -> Slot:
    """A masked result with nothing missing."""
    return Slot(data, all_true(data))


@dataclass(frozen=True)
class Call:
    """One operator call: ``c["dim"]`` is an argument by its schema name, the schema's default where it was left out."""

    op: OpOverload
    bound: dict[str, Any]
    # What arguments hold after the call, by name, where the operator writes to them beside its result.
    updates: dict[str, Slot] = field(default_factory=dict)

    @classmethod
    def of(cls, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        bound = {}
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

    def get(self, name: str, default: Any = None) -> Any:
        return self.bound.get(name, default)

    def dims(self, ndim: int, name: str = "dim") -> tuple[int, ...]:
        """The dimensions meant by a `dim` argument, non-negative; None, () and a missing argument are all of them."""
        dim = self.bound.get(name)
        if dim is None or (not isinstance(dim, int) and len(dim) == 0):
            return tuple(range(ndim))
        return tuple(d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)) if ndim else ()

    def slots(self) -> list[Slot]:
        """Every tensor argument, through lists."""
        return [leaf for leaf in tree_leaves(list(self.bound.values())) if isinstance(leaf, Slot)]

    def plainly(self, changes: dict[str, Any] | None = None) -> Any:
        """What plain torch gives for the call, slots as their data, with some arguments changed."""
        return self.run({**self.bound, **(changes or {})}, lambda slot: slot.data)

    def run(self, bound: dict[str, Any], view: Callable[[Slot], Any]) -> Any:
        """The operator called with `bound`, slots seen through `view`."""
        values = tree_map(lambda leaf: view(leaf) if isinstance(leaf, Slot) else leaf, bound)
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
    """Decorator: the function is the oracle of these operators: aten names, several in a string, all their overloads
    unless one is named."""

    def keep(function: Oracle) -> Oracle:
        for name in " ".join(names).split():
            if name in TABLE:
                raise ValueError(f"{name} has an oracle already")
            TABLE[name] = function
        return function

    return keep


def broadcast_valid(shape: Sequence[int], slots: Sequence[Slot]) -> Tensor:
    """Where every slot, broadcast to `shape`, is valid."""
    mask = torch.ones(tuple(shape), dtype=torch.bool)
    for slot in slots:
        mask = mask & slot.mask.expand(mask.shape)
    return mask


def scatter_back(template: Tensor, positions: Sequence[Tensor], pieces: Sequence[Tensor]) -> Tensor:
    """A tensor of template's shape whose flat `positions` hold `pieces`; differentiable; zero elsewhere."""
    dtype = pieces[0].dtype if pieces else template.dtype
    out = torch.zeros(template.numel(), dtype=dtype)
    kept = [(where, piece) for where, piece in zip(positions, pieces, strict=True) if where.numel()]
    if kept:
        out = out.index_put((torch.cat([w for w, _ in kept]),), torch.cat([p.reshape(-1) for _, p in kept]))
    return out.reshape(template.shape)


def lines(shape: Sequence[int], dims: Sequence[int]) -> Iterator[Tensor]:
    """The flat positions of each slice over `dims`, in the order of the remaining dimensions."""
    rest = [d for d in range(len(shape)) if d not in dims]
    width = math.prod(shape[d] for d in dims)
    positions = torch.arange(math.prod(shape)).reshape(tuple(shape)).permute([*rest, *sorted(dims)])
    yield from positions.reshape(math.prod(shape[d] for d in rest), width)
