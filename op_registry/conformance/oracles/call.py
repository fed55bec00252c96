"""A call as oracles see it: each tensor with a bool mask of its full shape, each argument by its schema name.

Oracles compute the expected result of an operator in the simplest way, however slow: loops over slices without their
invalid elements, explicit products, lookups by index. They share no code with the rules. They are written in
differentiable torch, so the gradient of an oracle is the expected gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.conformance.sample import tree_leaves, tree_map


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


# ----------------------------------------------------------------------------------------------------------------------
# The engine of the oracles that loop: groups of elements, a plain function on the valid ones, and the expected result.

# A group is the set of elements that one result reads: a slice, a window, a bag, a pair of rows. An oracle specifies
# its groups, by flat indices into its operands, and what plain torch computes from a group's valid elements::
#
#     reduce_groups(groups([x], slices(x.shape, dims)), lambda group: group.values[0].sum(), c.plain())
#
# `reduce_groups` makes one result element of each group, `map_groups` one of each valid element.

# Flat indices into the operands: the same for all operands, or one tensor for each.
Indices = Tensor | Sequence[Tensor]
Results = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Group:
    """One group of elements, and its elements that are valid in every operand.

    number  the group's position among all groups
    size    the number of its elements, valid or not
    kept    the indices, within the group, of the elements that are valid in every operand
    flat    the flat indices of these elements in the first operand
    values  their values in each operand
    """

    number: int
    size: int
    kept: Tensor
    flat: Tensor
    values: tuple[Tensor, ...]


def slices(shape: Sequence[int], dims: Iterable[int]) -> Iterator[Tensor]:
    """The flat indices of each slice over `dims`, in the order of the remaining dimensions."""
    over = sorted(dims)
    rest = [d for d in range(len(shape)) if d not in over]
    indices = torch.arange(math.prod(shape)).reshape(tuple(shape)).permute([*rest, *over])
    yield from indices.reshape(math.prod(shape[d] for d in rest), math.prod(shape[d] for d in over))


def groups(operands: Sequence[Expected], indices: Iterable[Indices]) -> Iterator[Group]:
    """The valid elements of each group of flat indices."""
    flat_data = [operand.data.reshape(-1) for operand in operands]
    flat_masks = [operand.mask.reshape(-1) for operand in operands]
    for number, group in enumerate(indices):
        per_operand = [group] * len(operands) if isinstance(group, Tensor) else group
        mask = flat_masks[0][per_operand[0]]
        for other, index in zip(flat_masks[1:], per_operand[1:], strict=True):
            mask = mask & other[index]
        kept = mask.nonzero().reshape(-1)
        chosen = [index[kept] for index in per_operand]
        values = tuple(data[index] for data, index in zip(flat_data, chosen, strict=True))
        yield Group(number, len(mask), kept, chosen[0], values)


def reduce_groups(
    each: Iterable[Group], one: Callable[[Group], Results], plain: Results, least: int | Callable[[Group], int] = 1
) -> Any:
    """One result element (several, if `plain` is a sequence) from each group: `one` of the group's valid elements.

    Valid if at least `least` elements of the group are. A group that has fewer elements at all has plain torch's own
    result, which is valid.
    """

    def result(group: Group) -> tuple[bool, Results | None]:
        wanted = least if isinstance(least, int) else least(group)
        enough = len(group.kept) >= wanted
        return enough or group.size < wanted, one(group) if enough else None

    return collect(map(result, each), plain)


def collect(results: Iterable[tuple[bool, Results | None]], plain: Results) -> Any:
    """The expected result (several, if `plain` is a sequence), from each group's validity and results.

    A group without results has plain torch's own. If a group's result has several elements, they form the first
    dimension of the expected result.
    """
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    known, per_group = [], []
    for is_valid, parts in results:
        known.append(is_valid)
        per_group.append([parts] if isinstance(parts, Tensor) else parts)
    mask = torch.tensor(known, dtype=torch.bool)
    expected = []
    for n, out in enumerate(outs):
        if not known or not out.numel():
            expected.append(valid(out))
            continue
        own = out.reshape(-1, len(known))
        columns = [own[:, k] if parts is None else parts[n].reshape(-1) for k, parts in enumerate(per_group)]
        data = torch.stack(columns, -1)
        expected.append(Expected(data.reshape(out.shape).to(out.dtype), mask.expand(data.shape).reshape(out.shape)))
    return expected[0] if isinstance(plain, Tensor) else tuple(expected)


def map_groups(each: Iterable[Group], one: Callable[[Group], Results], plain: Results, mask: Tensor) -> Any:
    """`one` computes a result for each valid element of a group, which replaces the element; masked by `mask`."""
    outs = [plain] if isinstance(plain, Tensor) else list(plain)
    flat: list[Tensor] = []
    pieces: list[list[Tensor]] = [[] for _ in outs]
    for group in each:
        if not len(group.kept):
            continue
        results = one(group)
        flat.append(group.flat)
        for parts, result in zip(pieces, [results] if isinstance(results, Tensor) else results, strict=True):
            parts.append(result)
    expected = [
        Expected(scatter_back(out.shape, flat, [p.to(out.dtype) for p in parts], out.dtype), mask)
        for out, parts in zip(outs, pieces, strict=True)
    ]
    return expected[0] if isinstance(plain, Tensor) else tuple(expected)


def scatter_back(
    shape: Sequence[int], indices: Sequence[Tensor], pieces: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """A tensor with `pieces` at the flat `indices` and zeros elsewhere; differentiable."""
    out = torch.zeros(math.prod(shape), dtype=dtype)
    if indices:
        out = out.index_put((torch.cat(list(indices)),), torch.cat([p.reshape(-1) for p in pieces]))
    return out.reshape(tuple(shape))
