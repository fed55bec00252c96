"""Elementwise operators on sparse records: the rule runs on the stored values.

Law: an element of the result depends on the elements of the operands at the same coordinates. So the rule runs on the
values of one sparse operand, the *lead*, and on those of the other operands at its coordinates. The result has the
lead's pattern: an element that is absent from one operand is invalid in the result. That is why exp, cos and division
stay sparse.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dims import shape_alone
from op_registry.rule import Rule
from op_registry.sparse.broadcast import expand_sparse
from op_registry.sparse.elements import elements_at
from op_registry.sparse.lowering import ForRule
from op_registry.sparse.permuted import in_base_order
from op_registry.sparse.record import NotLowered, Sparse, to_dense


def on_values(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on the values of one sparse operand and those of the other operands at its coordinates."""
    if any(argument.name in ("dim", "dims") for argument in op._schema.arguments):
        raise NotLowered("its elements read their neighbours")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotLowered("it draws a random number for every element, stored or not")
    lead = lead_operand(records_among([*args, *kwargs.values()]))
    if kwargs.get("memory_format") is not None:
        # Memory formats are those of dense tensors and do not apply to values; this raises torch's errors.
        shape_alone(lead.shape).clone(memory_format=kwargs["memory_format"])
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}

    def aligned(record: Dense | Sparse) -> Dense:
        return align_to(record, lead)

    args, named = map_tensors(aligned, (args, list(kwargs.items())), (Dense, Sparse))
    return map_tensors(lead.like, rule.bind(op)(*args, **dict(named)), Dense)


def on_permuted_values(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """`on_values` for dense dimensions before sparse ones, after permuting every operand to the order of the base."""

    return in_base_order(functools.partial(on_values, rule))(op, *args, **kwargs)


ON_VALUES = ForRule(on_values)
ON_PERMUTED_VALUES = ForRule(on_permuted_values)


def lead_operand(records: Sequence[Dense | Sparse]) -> Sparse:
    """The sparse operand that has the broadcast shape, or the first one that expands to it; NotLowered if none does."""
    first = records[0]
    if isinstance(first, Sparse) and all(
        isinstance(r, Sparse) and r.pattern is first.pattern and r.values.shape == first.values.shape for r in records
    ):
        return first
    shape = torch.broadcast_shapes(*(r.shape for r in records))
    for record in records:
        if isinstance(record, Sparse) and record.shape == shape:
            return record
    for record in records:
        if isinstance(record, Sparse) and 0 not in shape:
            return expand_sparse(record, shape)
    raise NotLowered(f"no sparse operand has the shape of the result, {tuple(shape)}")


def records_among(values: Sequence[Any]) -> list[Dense | Sparse]:
    """Every record among arguments, dense or sparse, including those in lists."""
    records: list[Dense | Sparse] = []
    map_tensors(records.append, list(values), (Dense, Sparse))
    return records


def align_to(record: Dense | Sparse, lead: Sparse) -> Dense:
    """The elements of a record at the coordinates that `lead` stores, shaped to broadcast with `lead.values`."""
    pattern, dense = lead.pattern, len(lead.dense_sizes)
    if isinstance(record, Sparse):
        if record.ndim <= dense:
            return to_dense(record)  # broadcasts with dense dimensions only, and is no larger than one value of `lead`
        if len(record.dense_sizes) != dense:
            raise NotLowered("two operands are sparse in different dimensions")
        if record.pattern.same_as(pattern):
            return record.values
        return elements_at(record, pattern.coordinates()[pattern.ndim - record.pattern.ndim :]).map(pattern.fold)
    if record.ndim <= dense:
        # Broadcasts as it is. A 0-d tensor stays 0-d, since torch's type promotion counts only its category.
        return record
    sparse = record.ndim - dense  # the number of its dimensions that broadcast with sparse ones
    sizes = record.shape[:sparse]
    if all(size == 1 for size in sizes):
        return record.map(lambda t: t.reshape((1,) * pattern.lead + tuple(t.shape[sparse:])))
    coordinates = pattern.coordinates()[pattern.ndim - sparse :]
    if len(coordinates) != sparse:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    return elements_at(record, coordinates).map(pattern.fold)
