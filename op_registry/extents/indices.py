"""Reading and writing at computed positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.bound import Bound
from op_registry.dimensions import AtIndices, Indexed, Label, Labels, atoms
from op_registry.extents.combine import combined
from op_registry.extents.factors import Along, Factor, conjunction, factors_of, narrowed, without_order
from op_registry.extents.follow import followed, only_padded, records_of, refuse, sizes_of, with_factors
from op_registry.extents.regroup import carried
from op_registry.records.dense import Dense
from op_registry.records.validity import as_int8, intersect
from op_registry.rule import Run


def looked_up(call: Bound, labels: Labels, run: Run) -> Any:
    """Elements at the positions that an index names: its extent, and that of other dimensions, is the result's.

    An element is valid only where the position that it is read from is there.
    """
    records = records_of(call)
    if call.rule.category.name == "accumulation":
        return written(call, labels, run)
    first, record = next(iter(records.items()))
    indexed = [d for d, dim in enumerate(labels.operands[first]) if labels.role_of(dim) == "indexed"]
    hidden = [f for f in factors_of(record) if any(f.along[d] is not None for d in indexed)]
    if not hidden:
        return followed(call, labels, call.applied(run))
    readable = Dense(record.data, record.validity)  # (mask within extent: what is not there is invalid)
    result: Dense = call.with_(**{first: readable}).applied(run)
    sizes, dims = sizes_of(call, labels), labels.results[0]
    rest = [f for f in factors_of(record) if f not in hidden]
    operands = [[carried(f, labels.operands[first], dims, sizes) for f in rest]]
    operands += [
        [carried(f, labels.operands[name], dims, sizes) for f in factors_of(r)]
        for name, r in records.items()
        if name != first
    ]
    moved = [_moved(call, first, f, labels, result) for f in hidden] if isinstance(call.rule.dims, Indexed) else []
    if isinstance(call.rule.dims, AtIndices):
        moved = [_moved(call, first, f, labels, result) for f in hidden]
    found = combined([*([f for f in each if f is not None] for each in operands), moved], call.rule.name)
    return with_factors(result, found, only_padded(records))


def _moved(call: Bound, first: str, factor: Factor, labels: Labels, result: Dense) -> Factor:
    """A factor of the operand that is read, at the positions that are read."""
    record = call.tensors[first]
    assert factor.there is not None
    read = call.with_(**{first: Dense(factor.there.expand(record.shape))}).run()
    there = as_int8(read.data) if read.validity is None else intersect(as_int8(read.data), read.validity)
    assert there is not None
    known: dict[Label, Along] = {}
    for dim, along in zip(labels.operands[first], factor.along, strict=True):
        known |= dict.fromkeys(atoms(dim), along)
    moved = tuple(
        known[label] if label in known else without_order(_indexed(labels, first, factor))
        for label in (atoms(dim)[0] for dim in labels.results[0])
    )
    return Factor(moved, narrowed(there, moved))


def _indexed(labels: Labels, first: str, factor: Factor) -> Any:
    found = [
        along
        for dim, along in zip(labels.operands[first], factor.along, strict=True)
        if along is not None and labels.role_of(dim) == "indexed"
    ]
    return found[0] if found else None


def written(call: Bound, labels: Labels, run: Run) -> Any:
    """Assignments and accumulations: which positions of the first operand are there does not change.

    What is written where none is, is dropped; and a source writes nothing from positions that it does not have.
    """
    records = records_of(call)
    first, record = next(iter(records.items()))
    if record.extent is None or any(r.extent is not None for n, r in records.items() if n != first):
        call = _from_what_is_there(call, labels, records, first)
    result = call.applied(run)
    factors: Sequence[Factor] = factors_of(record)
    if not factors:
        return result
    validity = intersect(result.validity, conjunction(factors))
    return with_factors(Dense(result.data, validity), factors, padded=only_padded(records), grows=False)


def _from_what_is_there(call: Bound, labels: Labels, records: Any, first: str) -> Bound:
    others = {n: r for n, r in records.items() if n != first and r.extent is not None}
    if not others:
        return call
    raise refuse(call, "an operand that is written has positions of its own")
