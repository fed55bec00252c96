"""What an operator of another library has to give, by the category of its rule and the operator's own schema.

The oracles of aten's operators know their arguments by aten's names. Here nothing is known but the schema: the operand
is the first tensor argument, whatever it is called, and a dimension is an argument called dim, dims, axis or axes.
Each oracle runs the operator itself, on data from which what is invalid was taken out before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles import pointwise, positions
from op_registry.conformance.oracles.slices import along_lines, reduce_by_slices
from op_registry.conformance.oracles.slots import Call, NoOracle, Oracle, Slot, broadcast_valid
from op_registry.conformance.trees import tree_leaves, tree_map

DIMENSIONS = ("dim", "dims", "axis", "axes")
KEEPS = ("keepdim", "keepdims")
# Calls of the operator that the oracle of contractions may cost.
MOST_BASIS_CALLS = 3_000


def elementwise(c: Call) -> Any:
    """The operator on the valid positions alone, laid out in a row: nothing can come from anywhere else."""
    slots = c.slots()
    plain = c.plainly()

    def of_one(out: Tensor, n: int) -> Slot:
        shape = torch.broadcast_shapes(*(slot.shape for slot in slots))
        if out.shape != shape:
            raise ValueError(
                f"{c.name} is no elementwise operator: its result has the shape {tuple(out.shape)}, its operands "
                f"broadcast to {tuple(shape)}"
            )
        mask = broadcast_valid(out.shape, slots)
        if not bool(mask.any()) or bool(mask.all()):
            return Slot(out, mask)

        def in_a_row(slot: Slot) -> Tensor:
            # A 0-d operand stays one: it takes another part in type promotion.
            return slot.data.expand(out.shape)[mask] if slot.ndim else slot.data

        try:
            values = tree_leaves(c.run(c.bound, in_a_row))[n]
        except Exception:
            # The operator takes other shapes only; what it gives in place is all there is to compare with.
            return Slot(out, mask)
        return Slot(torch.zeros_like(out).masked_scatter(mask, values.to(out.dtype)), mask)

    leaves = iter([of_one(out, n) for n, out in enumerate(tree_leaves(plain))])
    return tree_map(lambda _: next(leaves), plain)


def reduction(c: Call) -> Any:
    """The operator on each compressed slice."""
    operand = only_operand(c)
    x, dim, keep = c[operand], _argument(c, DIMENSIONS), _argument(c, KEEPS)

    def one(values: Tensor) -> Any:
        changed: dict[str, Any] = {operand: values}
        if dim is not None:
            changed[dim] = _first_dimension(c, dim)
        if keep is not None:
            changed[keep] = False
        result = c.run({**c.bound, **changed}, lambda slot: slot.data)
        for leaf in tree_leaves(result):
            if _may_be_a_position(leaf, values):
                raise NoOracle(f"whether the {leaf.dtype} result of {c.name} is a position or a number")
        return result

    return reduce_by_slices(c, one, operand=operand, dims=c.dims(x.ndim, dim or ""))


def scan(c: Call) -> Any:
    """The operator on each compressed line."""
    operand, dim = only_operand(c), _argument(c, DIMENSIONS)
    if dim is None or not isinstance(c[dim], int):
        raise NoOracle(f"the dimension of {c.name}: no argument called {', '.join(DIMENSIONS)} says it")

    def one(values: Tensor) -> Any:
        result = c.run({**c.bound, operand: values, dim: 0}, lambda slot: slot.data)
        for leaf in tree_leaves(result):
            if _may_be_a_position(leaf, values):
                raise NoOracle(f"whether the {leaf.dtype} result of {c.name} is a position or a number")
        return result

    return along_lines(c, one, c[dim], operand=operand)


def contraction(c: Call) -> Slot:
    """A sum over tuples of elements, one of each operand: what each tuple contributes is asked of the operator itself,
    by tensors that are 1 in one place and 0 elsewhere. Valid where a tuple of valid elements contributes, or none does.
    """
    names = [name for name, value in c.bound.items() if isinstance(value, Slot)]
    if len(names) != len(c.slots()):
        raise NoOracle(f"{c.name} of a list of tensors")
    slots = [c[name] for name in names]
    plain = c.plainly()
    if not isinstance(plain, Tensor):
        raise NoOracle(f"{c.name} with more than one result")
    if math.prod(slot.data.numel() for slot in slots) > MOST_BASIS_CALLS:
        raise NoOracle(f"{c.name} of more than {MOST_BASIS_CALLS} tuples of elements")
    total = torch.zeros_like(plain)
    reached, contributed = (torch.zeros(plain.shape, dtype=torch.bool) for _ in range(2))
    for places in itertools.product(*(range(slot.data.numel()) for slot in slots)):
        units = {n: _unit(slot.data, k) for n, slot, k in zip(names, slots, places, strict=True)}
        share = c.run({**c.bound, **units}, lambda slot: slot.data).detach()
        contributed |= share != 0
        if all(bool(slot.mask.reshape(-1)[k]) for slot, k in zip(slots, places, strict=True)):
            reached |= share != 0
            product = math.prod((slot.data.reshape(-1)[k] for slot, k in zip(slots, places, strict=True)), start=share)
            total = total + torch.where(share != 0, product, 0)
    nothing = ~contributed
    return Slot(torch.where(nothing, plain, total), reached | nothing)


def _unit(data: Tensor, place: int) -> Tensor:
    unit = torch.zeros(data.numel(), dtype=data.dtype)
    unit[place] = 1
    return unit.reshape(data.shape)


def only_operand(c: Call) -> str:
    """The name of the one tensor argument; NoOracle where there are more, which would have to be compressed alike."""
    names = [a.name for a in c.op._schema.arguments if a.name in c and isinstance(c[a.name], Slot)]
    if len(names) != 1 or len(c.slots()) != 1:
        raise NoOracle(f"{c.name} of {len(c.slots())} tensors: how they belong together, its schema does not say")
    return names[0]


def _argument(c: Call, names: Sequence[str]) -> str | None:
    return next((a.name for a in c.op._schema.arguments if a.name in names), None)


def _first_dimension(c: Call, name: str) -> Any:
    """Dimension 0, as the argument's type wants it."""
    (kind,) = (str(a.type) for a in c.op._schema.arguments if a.name == name)
    return [0] if "List" in kind else 0


def _may_be_a_position(result: Any, values: Tensor) -> bool:
    """Positions in a compressed slice are not those in the slice itself; numbers of something are."""
    return isinstance(result, Tensor) and result.dtype is torch.int64 and values.dtype is not torch.int64


# The category that a rule claims is the law that its operator is held to.
BY_CATEGORY: dict[str, Oracle] = {
    "elementwise": elementwise,
    "movement": positions.movement,
    "join": positions.movement,
    "reduction": reduction,
    "scan": scan,
    "contraction": contraction,
    "opaque": pointwise.opaque,
    "refused": pointwise.refused,
    "random": pointwise.as_torch_under_the_input,
}
