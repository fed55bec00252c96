"""Which elements of an operand meet a given part of a result, or of another operand, by the labels of dimensions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from op_registry.dimensions.labels import Dimension, Labels, Role
from op_registry.dimensions.sizes import known_to_hold
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8

# A dimension that is batch; those along which operands meet element by element, although no result has them.
BATCH: Collection[Role | None] = (None,)
OF_LOSSES: Collection[Role | None] = (None, "reduced")
OF_PRODUCTS: Collection[Role | None] = (None, "contracted")


def spread(
    part: Tensor,
    dims: Sequence[Dimension],
    labels: Labels,
    name: str,
    shape: Sequence[int],
    shared: Collection[Role | None] = BATCH,
) -> Tensor | None:
    """Which elements of the operand `name` meet `part`, int8 that broadcasts to something with these dimensions.

    Along a dimension that both have and whose role is `shared`, an element meets those at its index; along others, any.
    None: all of them.
    """
    mine = labels.operands[name]
    if len(mine) != len(shape):
        return None
    places: dict[Dimension, int] = {
        dim: d for d, dim in enumerate(dims) if dim is not None and labels.role_of(dim) in shared
    }
    source = [places.get(dim) for dim in mine]
    order = [d for d in source if d is not None]
    found = anywhere(part, [d for d in range(part.ndim) if d not in order])
    kept = sorted(order)
    found = found.permute([kept.index(d) for d in order])
    for d, place in enumerate(source):
        if place is None:
            found = found.unsqueeze(d)
    return broadcast_back(found, shape)


def broadcast_back(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Which elements of an operand of this shape meet `part` of what it is broadcast to."""
    more = part.ndim - len(shape)
    found = anywhere(part, range(more))
    return anywhere(found, [d for d, size in enumerate(shape) if known_to_hold(size == 1)], keepdim=True)


def anywhere(part: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Whether `part` has any index along these dimensions."""
    read = [d for d in dims if not known_to_hold(part.shape[d] == 1)]
    if read:
        part = as_int8(part.any(read, keepdim=True))
    return part.squeeze(tuple(dims)) if dims and not keepdim else part


def is_met_everywhere(x: Dense, dims: Sequence[Dimension], mine: Collection[Dimension]) -> bool:
    """Whether it is known that x has a valid element at each index of the dimensions that both have."""
    gone = [d for d, dim in enumerate(dims) if dim not in mine]
    return bool(gone) and x.each_slice_has_one(gone)
