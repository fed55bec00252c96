"""Lowerings that are composed of other operators.

call            an operator on records, by its lowering where one of them is sparse, else by its rule
call_broadcast  an elementwise operator of two records that broadcast
broadcast_to    a sparse record in a larger shape
rows_of         the operand whose stored rows a rule may run on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.autocast import autocast_on
from op_registry.records.dense import Dense, map_tensors, valid_in_all
from op_registry.registry import registry
from op_registry.rule import Rule
from op_registry.sparse.broadcast import expand_sparse
from op_registry.sparse.elementwise import align_to, lead_operand
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.permuted import AnyRecord, Permuted, to_dense
from op_registry.sparse.record import NotLowered, Sparse

aten = torch.ops.aten


def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An operator on records, as the rule book has it, by its lowering where one of them is sparse."""
    rule = registry.written(op)
    if rule is None:
        raise NotLowered(f"{op} has no rule")
    sparse: list[Any] = []
    map_tensors(sparse.append, [*args, *kwargs.values()], (Sparse, Permuted))
    if sparse:
        return run_sparsely(op, rule, args, kwargs)
    return rule.bind(op)(*args, **kwargs)


def refuse_permuted(*records: AnyRecord | None) -> None:
    """NotLowered where a record has its dimensions in another order."""
    if any(isinstance(r, Permuted) for r in records):
        raise NotLowered("an operand has dense dimensions before sparse ones")


def dense_or_none(x: Dense | Sparse | None) -> Any:
    """A record as a dense one: for operands that are no larger than the result, which is dense."""
    return x if x is None else to_dense(x)


def rows_of(x: Any, *others: Any) -> Sparse:
    """The operand whose rows are worked on: sparse, with dense dimensions; NotLowered if another operand is sparse."""
    if not isinstance(x, Sparse) or any(isinstance(other, (Sparse, Permuted)) for other in others):
        raise NotLowered("an operand other than the first is sparse")
    if not x.dense_sizes or x.shape[-1] == 0:
        raise NotLowered("the dimension that it works on is sparse, or empty")
    return x


def broadcast_to(x: Any, shape: Sequence[int]) -> Any:
    """A sparse record expanded to a shape; a dense one as it is, which broadcasts by itself."""
    return expand_sparse(x, shape) if isinstance(x, Sparse) and tuple(x.shape) != tuple(shape) else x


def call_broadcast(op: OpOverload, x: Any, y: Any, **kwargs: Any) -> Any:
    """An elementwise operator of two records that broadcast."""
    refuse_permuted(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return call(op, broadcast_to(x, shape), broadcast_to(y, shape), **kwargs)


def slice_of(x: Any, dim: int, start: int, end: int) -> Any:
    """The record from `start` to before `end` along `dim`."""
    return call(aten.slice.Tensor, x, dim, start, end, 1)


def require_float(*records: Any) -> None:
    """Of half precision and integers, the rules for dense storage have more to say."""
    if any(r.dtype not in (torch.float32, torch.float64) for r in records):
        raise NotLowered("it is computed in another dtype")
    if autocast_on(records[0].device):
        raise NotLowered("autocast chooses another dtype")


def distance(x: Any, y: Any, p: float, dim: Any, eps: float = 0) -> Dense:
    """The norm of the differences of what both have."""
    require_float(x, y)
    apart = call_broadcast(aten.sub.Tensor, x, y)
    if eps:
        values = apart.values if isinstance(apart, Sparse) else apart
        moved = values.like(values.data + eps)
        apart = apart.like(moved) if isinstance(apart, Sparse) else moved
    return to_dense(call(aten.linalg_vector_norm.default, apart, p, dim))  # a number for each row


def joint_sums(x: Any, y: Any, dim: int) -> tuple[Dense, Dense, Dense]:
    """Σxy, Σx² and Σy² over the coordinates that are valid in both."""
    refuse_permuted(x, y)
    require_float(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if 0 in shape or not -len(shape) <= dim < len(shape):
        raise NotLowered("torch refuses it, or there is nothing in it")
    x, y = broadcast_to(x, shape), broadcast_to(y, shape)
    lead = lead_operand([x, y])
    a, b = (align_to(r, lead) for r in (x, y))
    joint = valid_in_all(a, b)
    a, b = (Dense(Dense(r.data.expand(lead.values.shape), joint).filled(0)) for r in (a, b))

    def total(t: Tensor) -> Dense:
        result = to_dense(call(aten.sum.dim_IntList, lead.like(Dense(t, joint)), [dim]))
        return Dense(result.filled(0), result.validity)

    return total(a.data * b.data), total(a.data * a.data), total(b.data * b.data)


def without_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the operator's arguments, without the overload, as a lowering of sparse records."""

    def lowering(op: OpOverload, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(r, Sparse) for r in (x if isinstance(x, (list, tuple)) else [x])):
            raise NotLowered("what is moved is stored densely")
        return function(x, *args, **kwargs)

    return lowering


def lowers(rule: Rule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function of the operator's arguments, without the overload, as the rule's lowering."""

    def hang(function: Callable[..., Any]) -> Callable[..., Any]:
        rule.lowering(Sparse)(without_op(function))
        return function

    return hang


def refuse_dense_dims(x: Sparse) -> None:
    """NotLowered where a record has dense dimensions."""
    if x.dense_sizes:
        raise NotLowered("it would mix sparse with dense dimensions")


def select_along(x: Sparse, chosen: dict[int, Tensor]) -> Sparse:
    """Index_select along several dimensions in turn."""
    for dim, lines in chosen.items():
        x = call(aten.index_select.default, x, dim, Dense(lines))
    return x


def map_dense_dim(x: Sparse, dim: int, move: Callable[[Tensor, int], Tensor]) -> Sparse:
    """A move within one dense dimension."""
    return x.like(x.values.map(lambda t: move(t, dim - x.pattern.ndim + x.pattern.lead)))
