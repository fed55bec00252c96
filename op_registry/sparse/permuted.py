"""Sparse records with permuted dimensions: dense dimensions before sparse ones.

A packed batch keeps attention heads in a dense dimension, (B, T, H, d), and attention wants them before time,
(B, H, T, d). A :class:`Permuted` record stores that order and moves no data; undoing the permutation is free. It is a
type of its own, so that no lowering of sparse records takes it by mistake. What accepts it:

    elementwise   the lowering of sparse records, after every operand was brought back to the base's order
    movement      of the order, or within the dense dimensions (ops/movement/permuted.py)
    last dims     rules on dense dimensions that are still the last ones (`on_last_dims`)
    attention     a lowering of its own (ops/attention/packed.py)

Everything else raises NotLowered; the caller then stores the operand densely, or refuses the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.records.dense import Dense, map_tensors
from op_registry.sparse.record import NotLowered, Sparse
from op_registry.sparse.record import to_dense as sparse_to_dense


class Permuted:
    """A sparse record seen with its dimensions in another order.

    base   the record
    order  for each dimension that is seen, which one of the base it is: ``permute(base, order)``; never the base's own,
           nor one that only moves sparse dimensions among themselves in front of the dense ones
    """

    __slots__ = ("base", "order")

    def __init__(self, base: Sparse, order: Sequence[int]) -> None:
        self.base = base
        self.order = tuple(order)

    def __repr__(self) -> str:
        return f"Permuted({self.base!r}, order={self.order})"

    @property
    def shape(self) -> torch.Size:
        sizes = self.base.shape
        return torch.Size(sizes[d] for d in self.order)

    @property
    def ndim(self) -> int:
        return len(self.order)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def like(self, base: Sparse) -> Permuted:
        """Another record in the same order."""
        return Permuted(base, self.order)

    @property
    def back(self) -> tuple[int, ...]:
        """The order that brings what is seen back to the base."""
        return tuple(sorted(range(self.ndim), key=self.order.__getitem__))


AnyRecord = Dense | Sparse | Permuted


def to_dense(x: AnyRecord) -> Dense:
    """The same tensor with every element stored."""
    if isinstance(x, Dense):
        return x
    if isinstance(x, Sparse):
        return sparse_to_dense(x)
    # Laid out as the tensor says that it is, in the order in which it is seen: views of it were chosen by that.
    return sparse_to_dense(x.base).map(lambda t: t.permute(x.order).contiguous())


def to_base_order(record: AnyRecord, by: Permuted) -> Dense | Sparse:
    """What takes part beside `by`, in the order of its base; NotLowered where only moving elements would do."""
    if isinstance(record, Permuted):
        if record.order != by.order:
            raise NotLowered("its operands have their dimensions in different orders")
        return record.base
    if isinstance(record, Sparse):
        raise NotLowered("of its operands, some have dense dimensions before sparse ones, and some do not")
    missing = by.ndim - record.ndim
    if missing < 0:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    if record.ndim == 0:
        return record  # torch lets a 0-d tensor take part with its kind only
    back = by.back
    return record.map(lambda t: t.reshape((1,) * missing + tuple(t.shape)).permute(back))


def in_base_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of sparse records that keeps elements in their places, for turned ones."""

    def turned(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        by = first_permuted([*args, *kwargs.values()])

        def back(record: AnyRecord) -> Dense | Sparse:
            return to_base_order(record, by)

        args, named = map_tensors(back, (args, list(kwargs.items())), (Dense, Sparse, Permuted))
        return map_tensors(by.like, run(op, *args, **dict(named)), Sparse)

    return turned


def on_last_dims(run: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
    """A lowering of sparse records that changes no dimension but the last ones of its first operand, for a turned one.

    `count`, called with the operator's arguments, says how many those are.
    """

    def turned(op: OpOverload, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Permuted) or any(isinstance(a, (Sparse, Permuted)) for a in [*args, *kwargs.values()]):
            raise NotLowered("an operand other than the first is sparse")
        last = x.ndim - count(x, *args, **kwargs)
        if x.order[last:] != tuple(range(last, x.ndim)) or last < x.base.pattern.ndim:
            raise NotLowered("the dimensions that it works on stand before sparse ones, or are sparse")
        result = run(op, x.base, *args, **kwargs)
        # A result without the last dimension is in the order of the others.
        return map_tensors(lambda r: Permuted(r, x.order[: r.ndim]), result, Sparse)

    return turned


def first_permuted(values: Sequence[Any]) -> Permuted:
    """The first turned record among arguments, through lists."""
    found: list[Permuted] = []
    map_tensors(found.append, list(values), Permuted)
    return found[0]
