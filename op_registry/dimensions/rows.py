"""How many last dimensions of an operand make up a row that an operator treats by itself: for fast paths."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from op_registry.dimensions.labels import (
    Dimensions,
    atoms,
    tensor_arguments,
)
from op_registry.dimensions.slices import Slices


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
