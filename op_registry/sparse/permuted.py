"""Permuted sparse records: dense dimensions in front of sparse ones.

A packed batch keeps attention heads in a dense dimension, (B, T, H, d), and attention wants them before time,
(B, H, T, d). A :class:`Permuted` record stores that order and moves no data; undoing the permutation is free. It is a
separate type so that lowerings for sparse records cannot accept it by mistake. What handles it:

    elementwise   the lowering for sparse records, after permuting every operand to the order of the base
    movement      permutations compose; dense dimensions may change (ops/movement/permuted.py)
    last dims     rules on dense dimensions that are still last (`on_last_dims`)
    attention     a lowering of its own (ops/attention/packed.py)

Everything else raises NotLowered; the caller then stores the operand densely, or refuses the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.records.dense import Dense, map_tensors
from op_registry.sparse.layout import COO
from op_registry.sparse.record import NotLowered, Sparse, from_coordinates, unpadded_elements, with_sparse_dims
from op_registry.sparse.record import to_dense as sparse_to_dense


class Permuted:
    """``permute(base, order)`` of a sparse record.

    base   the record
    order  for each dimension the dimension of `base` that it shows; never the identity, nor an order that only permutes
           sparse dimensions in front of the dense ones
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
    def inverse(self) -> tuple[int, ...]:
        """The inverse of `order`: permuting by it gives the base."""
        return tuple(sorted(range(self.ndim), key=self.order.__getitem__))


AnyRecord = Dense | Sparse | Permuted


def to_dense(x: AnyRecord) -> Dense:
    """The same tensor with every element stored."""
    if isinstance(x, Dense):
        return x
    if isinstance(x, Sparse):
        return sparse_to_dense(x)
    # Contiguous in the permuted order, as the tensor's strides say: callers have chosen view operators by those.
    return sparse_to_dense(x.base).map(lambda t: t.permute(x.order).contiguous())


def in_visible_order(x: Permuted) -> Sparse:
    """The same valid elements one by one, in COO, with every dimension sparse; not while tracing."""
    flat, coordinates = unpadded_elements(with_sparse_dims(x.base, x.ndim))
    return from_coordinates(COO, tuple(coordinates[d] for d in x.order), flat, x.shape)


def to_base_order(record: AnyRecord, permuted: Permuted) -> Dense | Sparse:
    """An operand beside `permuted`, permuted to the order of its base; NotLowered if that would move elements."""
    if isinstance(record, Permuted):
        if record.order != permuted.order:
            raise NotLowered("its operands have their dimensions in different orders")
        return record.base
    if isinstance(record, Sparse):
        raise NotLowered("some of its sparse operands have dense dimensions before sparse ones, and some do not")
    missing = permuted.ndim - record.ndim
    if missing < 0:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    if record.ndim == 0:
        return record  # stays 0-d, since torch's type promotion counts only the category of 0-d tensors
    inverse = permuted.inverse
    return record.map(lambda t: t.reshape((1,) * missing + tuple(t.shape)).permute(inverse))


def in_base_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering of sparse records that leaves elements at their coordinates, for permuted records."""

    def permuted_run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        permuted = first_permuted([*args, *kwargs.values()])

        def restored(record: AnyRecord) -> Dense | Sparse:
            return to_base_order(record, permuted)

        args, named = map_tensors(restored, (args, list(kwargs.items())), (Dense, Sparse, Permuted))
        return map_tensors(permuted.like, run(op, *args, **dict(named)), Sparse)

    return permuted_run


def on_last_dims(run: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
    """A lowering of sparse records that changes only the last dimensions of its first operand, for permuted records.

    `count`, called with the operator's arguments, returns the number of those dimensions.
    """

    def permuted_run(op: OpOverload, x: AnyRecord, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Permuted) or any(isinstance(a, (Sparse, Permuted)) for a in [*args, *kwargs.values()]):
            raise NotLowered("an operand other than the first is sparse")
        last = x.ndim - count(x, *args, **kwargs)
        if x.order[last:] != tuple(range(last, x.ndim)) or last < x.base.pattern.ndim:
            raise NotLowered("the dimensions that it works on stand before sparse ones, or are sparse")
        result = run(op, x.base, *args, **kwargs)
        # A result without the last dimension keeps the order of the others.
        return map_tensors(lambda r: Permuted(r, x.order[: r.ndim]), result, Sparse)

    return permuted_run


def first_permuted(values: Sequence[Any]) -> Permuted:
    """The first permuted record among arguments, including those in lists."""
    permuted: list[Permuted] = []
    map_tensors(permuted.append, list(values), Permuted)
    return permuted[0]
