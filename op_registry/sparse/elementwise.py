"""Elementwise operators on sparse records: the rule on the values as they lie.

Law: an element depends on what its operands have in its place. So the rule runs on the values of one sparse operand,
and on what the others have in its places. The result is stored where that operand is: an element that is absent in one
operand is invalid in the result, which is why exp, cos and division stay sparse.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.records.dense import Dense, map_tensors
from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.tracing import gradients_may_flow
from op_registry.rule import Rule
from op_registry.sparse.broadcast import expand_sparse
from op_registry.sparse.coordinates import Coordinates
from op_registry.sparse.gather_scatter import gather
from op_registry.sparse.lowering import ForRule
from op_registry.sparse.permuted import in_base_order
from op_registry.sparse.record import NotLowered, Sparse, to_dense


def on_values(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The rule on the values of one sparse operand, and on what the others have in its places."""
    if any(argument.name in ("dim", "dims") for argument in op._schema.arguments):
        raise NotLowered("its elements read their neighbours")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotLowered("it draws a random number for every element, stored or not")
    lead = lead_operand(records_among([*args, *kwargs.values()]))
    if kwargs.get("memory_format") is not None:
        # The order in memory of a dense tensor, which is not that of the values; torch's own errors are raised.
        torch.empty(lead.shape, device="meta").clone(memory_format=kwargs["memory_format"])
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}

    def in_its_places(record: Any) -> Dense:
        return align_to(record, lead)

    args, named = map_tensors(in_its_places, (args, list(kwargs.items())), (Dense, Sparse))
    return map_tensors(lead.like, rule.bind(op)(*args, **dict(named)), Dense)


def on_permuted_values(rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The same where dense dimensions stand before sparse ones: every operand is seen in the order of its base."""

    return in_base_order(functools.partial(on_values, rule))(op, *args, **kwargs)


ON_VALUES = ForRule(on_values)
ON_PERMUTED_VALUES = ForRule(on_permuted_values)


def lead_operand(records: Sequence[Dense | Sparse]) -> Sparse:
    """The sparse operand that has the shape of them all, or the first one expanded to it; NotLowered where none is."""
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
            grown = expand_sparse(record, shape)
            if isinstance(grown, Sparse):
                return grown
    raise NotLowered(f"no sparse operand has the shape of the result, {tuple(shape)}")


def records_among(values: Sequence[Any]) -> list[Any]:
    """Every record among arguments, dense or sparse, through lists."""
    found: list[Any] = []
    map_tensors(found.append, list(values), (Dense, Sparse))
    return found


def align_to(record: Dense | Sparse, lead: Sparse) -> Dense:
    """What a record has in the places where `lead` stores a value, shaped to broadcast with `lead.values`."""
    pattern, dense = lead.pattern, len(lead.dense_sizes)
    if isinstance(record, Sparse):
        if record.ndim <= dense:
            return to_dense(record)  # meets dense dimensions alone, as a whole: no more than `lead` has in one place
        if len(record.dense_sizes) != dense:
            raise NotLowered("two operands are sparse in different dimensions")
        if record.pattern.same_as(pattern):
            return record.values
        sizes = record.pattern.sizes
        return record.at(_broadcast(pattern.places()[pattern.ndim - len(sizes) :], sizes)).map(pattern.fold)
    if record.ndim <= dense:
        # Nothing to choose by place; a 0-d tensor stays one, since torch lets it take part with its kind only.
        return record
    sparse = record.ndim - dense  # how many of the record's dimensions meet sparse ones
    sizes = record.shape[:sparse]
    if all(size == 1 for size in sizes):
        return record.map(lambda t: t.reshape((1,) * pattern.lead + tuple(t.shape[sparse:])))
    places = pattern.places()[pattern.ndim - sparse :]
    if len(places) != sparse:
        raise NotLowered(f"a dense operand of shape {tuple(record.shape)} has more dimensions than the sparse one")
    index = _broadcast(places, sizes)
    validity = record.full_validity
    data = record.data
    # The derivative is a sum over the places that read an element: as everywhere, not in half precision.
    wide = accumulation_dtype(data.dtype) if gradients_may_flow(data) else data.dtype
    taken = gather(data.to(wide), index).to(data.dtype)
    return Dense(taken, None if validity is None else gather(validity, index)).map(pattern.fold)


def _broadcast(places: Coordinates, sizes: Sequence[int]) -> Coordinates:
    """The places in a tensor of `sizes` that broadcasting would bring to `places`."""
    return tuple(p if size != 1 else torch.zeros_like(p) for p, size in zip(places, sizes, strict=True))
