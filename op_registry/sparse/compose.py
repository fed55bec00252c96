"""Lowerings that are composed of other operators.

call            an operator on records: by its lowering if one of them is sparse, else by its dense rule
call_broadcast  an elementwise operator of two records that broadcast
broadcast_to    a sparse record expanded to a larger shape
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.autocast import autocast_on
from op_registry.records.dense import Dense, map_tensors, valid_in_all
from op_registry.records.dims import Dims
from op_registry.registry import registry
from op_registry.rule import Rule
from op_registry.sparse.broadcast import expand_sparse
from op_registry.sparse.elementwise import align_to, lead_operand
from op_registry.sparse.lowering import run_sparsely
from op_registry.sparse.permuted import AnyRecord, Permuted, to_dense
from op_registry.sparse.record import NotLowered, Sparse

aten = torch.ops.aten


def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An operator on records by its built-in rule: by its lowering if one of them is sparse, else densely."""
    rule = registry.written(op)
    if rule is None:
        raise NotLowered(f"{op} has no rule")
    sparse: list[Sparse | Permuted] = []
    map_tensors(sparse.append, [*args, *kwargs.values()], (Sparse, Permuted))
    if sparse:
        return run_sparsely(op, rule, args, kwargs)
    return rule.bind(op)(*args, **kwargs)


def refuse_permuted(*records: AnyRecord | None) -> None:
    """NotLowered if a record has dense dimensions before sparse ones."""
    if any(isinstance(r, Permuted) for r in records):
        raise NotLowered("an operand has dense dimensions before sparse ones")


def broadcast_to(x: AnyRecord, shape: Sequence[int]) -> Any:
    """A sparse record expanded to a shape; a dense one unchanged, since torch broadcasts it."""
    return expand_sparse(x, shape) if isinstance(x, Sparse) and tuple(x.shape) != tuple(shape) else x


def call_broadcast(op: OpOverload, x: AnyRecord, y: AnyRecord, **kwargs: Any) -> Any:
    """An elementwise operator of two records that broadcast."""
    refuse_permuted(x, y)
    if isinstance(x, Dense) and isinstance(y, Dense):
        return call(op, x, y, **kwargs)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return call(op, broadcast_to(x, shape), broadcast_to(y, shape), **kwargs)


def slice_of(x: AnyRecord, dim: int, start: int, end: int) -> Any:
    """The record from `start` to before `end` along `dim`."""
    return call(aten.slice.Tensor, x, dim, start, end, 1)


def require_float(*records: AnyRecord) -> None:
    """NotLowered unless all records are float32 or float64: for other dtypes, torch's rules are in the dense rule."""
    if any(r.dtype not in (torch.float32, torch.float64) for r in records):
        raise NotLowered("it is computed in another dtype")
    if autocast_on(records[0].device):
        raise NotLowered("autocast chooses another dtype")


def distance(x: AnyRecord, y: AnyRecord, p: float, dim: Dims, eps: float = 0) -> Dense:
    """The p-norm of ``x - y + eps`` over the elements that are valid in both."""
    require_float(x, y)
    difference = call_broadcast(aten.sub.Tensor, x, y)
    values = difference.values if isinstance(difference, Sparse) else difference
    # 1 where nothing is common: there a norm has a finite derivative, so that its 0 reaches both operands as 0.
    shifted = values.like(values.filled(1) + eps if eps else values.filled(1))
    difference = difference.like(shifted) if isinstance(difference, Sparse) else shifted
    return to_dense(call(aten.linalg_vector_norm.default, difference, p, dim))  # one number per row


def joint_sums(x: Dense | Sparse, y: Dense | Sparse, dim: int) -> tuple[Dense, Dense, Dense]:
    """Σxy, Σx² and Σy² over the coordinates that are valid in both."""
    refuse_permuted(x, y)
    require_float(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if 0 in shape or not -len(shape) <= dim < len(shape):
        raise NotLowered("torch refuses it, or it is empty")
    x, y = broadcast_to(x, shape), broadcast_to(y, shape)
    lead = lead_operand([x, y])
    a, b = (align_to(r, lead) for r in (x, y))
    joint = valid_in_all(a, b)
    a, b = (Dense(Dense(r.data.expand(lead.values.shape), joint).filled(0)) for r in (a, b))

    def total(t: Tensor) -> Dense:
        result = to_dense(call(aten.sum.dim_IntList, lead.like(Dense(t, joint)), [dim]))
        return Dense(result.filled(0), result.validity)

    return total(a.data * b.data), total(a.data * a.data), total(b.data * b.data)


def lowers(rule: Rule, *records: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the rule's lowering for sparse records, or for `records`, a function of the operator's arguments
    without the overload.

    Refuses calls whose first argument (each record of it, if it is a list) is another record.
    """
    kinds = records or (Sparse,)

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        def lowering(op: OpOverload, x: AnyRecord | Sequence[AnyRecord], *args: Any, **kwargs: Any) -> Any:
            if not (isinstance(x, kinds) or (isinstance(x, (list, tuple)) and all(isinstance(r, kinds) for r in x))):
                raise NotLowered("an operand whose elements would be moved is stored densely")
            return function(x, *args, **kwargs)

        for kind in kinds:
            rule.lowering(kind)(lowering)
        return function

    return decorator


def select_along(x: Sparse, indices: dict[int, Tensor]) -> Sparse:
    """index_select along several dimensions, with an index for each."""
    for dim, index in indices.items():
        x = call(aten.index_select.default, x, dim, Dense(index))
    return x


def map_dense_dim(x: Sparse, dim: int, move: Callable[[Tensor, int], Tensor]) -> Sparse:
    """`move`, a function of a tensor and a dimension, applied to the values along one dense dimension."""
    return x.like(x.values.map(lambda t: move(t, dim - x.pattern.ndim + x.pattern.lead)))
