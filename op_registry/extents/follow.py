"""The extents of a call's results, from those of its operands and the dimensions that its rule states.

Where none of what a call reduces or contracts is there, the result is the operator's own for an empty dimension: a sum
of nothing is 0, and so is a contraction over nothing. Where torch has no number (a maximum), or NaN (a mean), the
result is invalid.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Dimension, Label, Labels, atoms
from op_registry.dimensions.sizes import known_to_hold
from op_registry.dimensions.views import View
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import factors_of, where_all, with_size, zero_where
from op_registry.extents.meetings import carried, check_meetings, known_of, together
from op_registry.laws.categories import ATTENTION, CONTRACTION, ELEMENTWISE, FACTORY, MOVEMENT, REDUCTION
from op_registry.laws.whole_slices import WHOLE_SLICES
from op_registry.records.dense import Dense
from op_registry.records.extent import Extent, Factor, extent_of, is_nonempty, numbers_positions
from op_registry.records.tracing import may_be_read
from op_registry.records.validity import as_bool, unite
from op_registry.rule import Rule
from op_registry.sparse.permuted import RECORDS, AnyRecord, Permuted
from op_registry.sparse.record import NotLowered, Sparse

# Roles of dimensions along which a result is valid only where its operands are.
_KEEPING = frozenset({"each", "scanned", "contracted", "reduced", "parameter"})
# Categories of operators whose results may be valid where an element of the operand is not, among others of its slice.
_MIXING = (ELEMENTWISE, CONTRACTION, MOVEMENT)


def records_of(call: Bound) -> dict[str, Any]:
    """The records among a call's tensors, by name."""
    return {name: t for name, t in call.tensors.items() if isinstance(t, RECORDS)}


def given_of(records: Mapping[str, AnyRecord]) -> dict[str, Sequence[Factor]]:
    """The factors of each record that has an extent."""
    return {name: factors_of(record) for name, record in records.items() if record.extent is not None}


def is_all_valid(record: AnyRecord) -> bool:
    """Whether a record stores every element and no validity."""
    return isinstance(record, Dense) and record.validity is None


def any_stored(call: Bound) -> bool:
    """Whether a record is stored sparsely."""
    return any(isinstance(t, (Sparse, Permuted)) for t in call.tensors.values())


def only_padded(records: Mapping[str, AnyRecord]) -> bool:
    """Whether what is valid in every operand is what is there."""
    return all(is_all_valid(r) if r.extent is None else r.extent.is_mask for r in records.values())


def sizes_of(call: Bound, labels: Labels) -> dict[Label, int]:
    """The size of each label."""
    sizes = {**labels.sizes}
    for name, tensor in call.tensors.items():
        for dim, size in zip(labels.operands.get(name, ()), tensor.shape, strict=False):
            if not isinstance(dim, tuple) and (dim not in sizes or known_to_hold(sizes[dim] == 1)):
                sizes[dim] = size
    for name, tensor in call.tensors.items():
        sizes |= _of_parts(labels.operands.get(name, ()), tensor.shape, sizes)
    return sizes


def roles_of_positions(call: Bound, labels: Labels) -> set[str | None]:
    """What the operator does along dimensions that number positions of an operand."""
    return {
        labels.role_of(labels.operands[name][d])
        for name, record in records_of(call).items()
        if record.extent is not None
        for d in record.extent.positions
    }


def followed(call: Bound, labels: Labels, result: Any, written: str | None = None) -> Any:
    """The results of a call whose dimensions are batch, worked along, or gone, with their extents.

    written  the operand of which every element is written: what was valid in it does not count
    """
    records = records_of(call)
    given = given_of(records)
    read = {name: record for name, record in records.items() if name != written}
    sizes, padded, whole = sizes_of(call, labels), only_padded(read), there_says_all(read)
    made = call.rule.category is FACTORY
    mixes = call.rule.category in _MIXING and "each" in labels.roles.values()
    fills = made or mixes or written is not None
    keeping = _KEEPING | {"selected"} if isinstance(call.rule.dims, View) else _KEEPING
    grows = fills or not keeping.issuperset(labels.roles.values()) or _has_empty(labels, sizes)
    check_meetings(call, labels, given, sizes)
    numbers = itertools.count()

    def carried_from(dims: Sequence[Dimension], record: AnyRecord, of: Given = given) -> list[list[Factor]]:
        return [carried_to(fs, labels.operands[n], dims, sizes, records[n], record) for n, fs in of.items()]

    def of_result(record: Any, dims: Sequence[Dimension]) -> Any:
        number = next(numbers)
        if not isinstance(record, RECORDS) or (len(given) == 1 and record is records[next(iter(given))]):
            return record
        _check_sizes(call, labels, given, dims, record)
        found = together(carried_from(dims, record))
        if made:  # it is valid everywhere, or nowhere, whatever was read
            return with_factors(record, found, is_all_valid(record), grows, whole=True)
        gone = used_up(labels, dims, given, sizes)
        if not gone and not found and padded and whole and _has_all(call.rule):
            return Outcome(record, None, "there")
        if gone and not is_all_valid(record):
            moved = carried_from((*dims, *gone), record, depending(given, labels, gone))
            nothing = without_any([f for factors in moved for f in factors], len(gone), found)
            if nothing is not None:
                return with_factors(_with_results_of_nothing(call, labels, gone, record, number, nothing), found, False)
        return with_factors(record, found, padded, grows, whole)

    return for_each_result(result, labels.results, of_result)


def _check_sizes(call: Bound, labels: Labels, given: Given, dims: Sequence[Dimension], result: AnyRecord) -> None:
    """Refuse another number of samples, each of which has positions of its own: windows over them, a transform."""
    sizes = dict(zip(dims, result.shape, strict=False))
    for name, factors in given.items():
        for d, (dim, size) in enumerate(zip(labels.operands[name], call.tensors[name].shape, strict=True)):
            changed = dim in sizes and not known_to_hold(size == 1) and known_to_hold(sizes[dim] != size)
            if changed and any(factor.along[d] is not None for factor in factors):
                raise refuse(call, f"of {size} samples along dimension {d} its result has {sizes[dim]}, none of these")


def _has_all(rule: Rule) -> bool:
    """Whether a result of an operator is valid wherever any element that it reduces or contracts is."""
    return rule.category is CONTRACTION or (rule.category is REDUCTION and rule.traits.identity is not None)


def depending(given: Given, labels: Labels, gone: Sequence[Label]) -> Given:
    """The factors that depend on one of these labels."""
    return {
        name: [f for f in factors if any(a in gone for d in f.depends for a in atoms(labels.operands[name][d]))]
        for name, factors in given.items()
    }


def _of_parts(dims: Sequence[Dimension], shape: Sequence[int], sizes: Mapping[Label, int]) -> dict[Label, int]:
    """The sizes of those parts of merged dimensions that follow from the others."""
    found: dict[Label, int] = {}
    for dim, size in zip(dims, shape, strict=False):
        unknown = [a for a in atoms(dim) if a not in sizes] if isinstance(dim, tuple) else []
        known = math.prod(sizes[a] for a in atoms(dim) if a in sizes)
        if len(unknown) == 1:
            found[unknown[0]] = size // known if known else 0
    return found


def carried_to(
    factors: Sequence[Factor],
    operand: Sequence[Dimension],
    dims: Sequence[Dimension],
    sizes: Mapping[Label, int],
    record: AnyRecord,
    result: AnyRecord,
) -> list[Factor]:
    """The factors of an operand that leave a trace in a result, as factors of the result."""
    sizes = {**sizes, **_of_parts(dims, result.shape, sizes)}
    known = dict(zip(dims, result.shape, strict=False))
    broadcast: frozenset[Any] = frozenset(
        dim
        for dim, size in zip(operand, record.shape, strict=True)
        if known_to_hold(size == 1) and dim in known and not known_to_hold(known[dim] == 1)
    )
    device = result.device
    if device != record.device:
        factors = [factor.moved_by(lambda there: there.to(device)) for factor in factors]
    found = []
    for factor in factors:
        # (where the one position that is broadcast is not there, none of the result's is)
        positions = {dim for dim, a in zip(operand, factor.along, strict=True) if numbers_positions(a)} & broadcast
        moved = carried(factor, operand, dims, sizes, broadcast - positions)
        if moved is not None and positions:
            moved = moved.moved_by(operator.methodcaller("expand", [known[d] if d in positions else -1 for d in dims]))
        found.append(moved)
    return [factor for factor in found if factor is not None]


def _has_empty(labels: Labels, sizes: Mapping[Label, int]) -> bool:
    """Whether a dimension that is gone may have no elements: a result is then valid that has no operand."""
    return any(
        role in ("contracted", "reduced") and not known_to_hold(sizes.get(label, 1) != 0)
        for label, role in labels.roles.items()
    )


def there_says_all(records: Mapping[str, AnyRecord]) -> bool:
    """Whether factors say of each operand what is valid."""
    return all(is_all_valid(r) or (r.extent is not None and r.extent.factors) for r in records.values())


# How the validity of a result follows: "kept" as it is; "both" valid where it is there, too; "there" where it is there,
# which is everywhere without an extent;
# "part" as "both", for a view whose mask hides more than that part of its base's mask.
Mask = Literal["kept", "both", "there", "part"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A result of a rule, whose validity is still the rule's; its extent, and how its validity follows from that."""

    record: AnyRecord
    extent: Extent | None
    mask: Mask = "kept"


def with_factors(
    record: AnyRecord, factors: Sequence[Factor], padded: bool, grows: bool = True, whole: bool = False
) -> Outcome:
    """A result with the extent of these factors.

    padded  whether all of its operands are valid where they are there
    grows   whether the result may be valid where it is not there
    whole   whether a padded result is valid wherever it is there
    """
    mask: Mask = "kept"
    if grows and factors:
        mask = "there" if padded and whole and isinstance(record, Dense) else "both"
    if mask == "kept":
        return Outcome(record, extent_of(factors, padded))
    # (factors say what is there until the mask does)
    return Outcome(record, Extent(tuple(factors), padded), mask)


def for_each_result(result: Any, dims: Sequence[Any], change: Callable[[Any, Any], Any]) -> Any:
    """`change` of each result and its dimensions."""
    if isinstance(result, (list, tuple)):
        changed = [change(r, d) for r, d in zip(result, dims, strict=True)]
        return type(result)(changed) if type(result) in (list, tuple) else type(result)(*changed)
    return change(result, dims[0])


def for_each(result: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of each result, in lists and tuples of them too."""
    if isinstance(result, (list, tuple)):
        changed = [for_each(r, change) for r in result]
        return type(result)(changed) if type(result) in (list, tuple) else type(result)(*changed)
    return change(result)


def refuse(call: Bound, why: str) -> MaskedSemanticsError:
    """The error for a call that has no meaning where operands know which positions are there."""
    shapes = ", ".join(
        f"`{name}` of shape {tuple(r.shape)}" for name, r in records_of(call).items() if r.extent is not None
    )
    cost = ", which leaves a slice with any of it no result" if call.rule.category is WHOLE_SLICES else ""
    return MaskedSemanticsError(
        f"{call.rule.name}: {why} ({shapes} knows which of its positions are there). Apply it to each sample before "
        f"they are padded to a batch; or treat what is not there as missing values, x.without_extent(){cost}."
    )


def depends_at(call: Bound, labels: Labels, role: str) -> bool:
    """Whether a factor of an operand depends on a dimension along which the operator does this."""
    return any(
        factor.along[d] is not None and labels.role_of(dim) == role
        for name, record in records_of(call).items()
        if record.extent is not None
        for factor in (*record.extent.factors, *[s.there for s in record.extent.states])
        for d, dim in enumerate(labels.operands[name])
    )


def without(record: AnyRecord, dims: Sequence[int]) -> tuple[Factor, ...]:
    """The factors of a record that depend on none of these dimensions."""
    return tuple(f for f in factors_of(record) if all(f.along[d] is None for d in dims))


# ---------------------------------------------------------------------------------------------------- nothing to reduce

# Roles of dimensions of which one result takes all elements (some operators have results for each element, too).
_USING = ("contracted", "reduced", "each", "scanned", "front")

# The factors of each operand that has an extent, by its name.
Given = Mapping[str, Sequence[Factor]]


def used_up(labels: Labels, dims: Sequence[Dimension], given: Given, sizes: Mapping[Label, int]) -> tuple[Label, ...]:
    """The labels on which factors depend that a result of these dimensions does not have; none if it is known that
    something is there along them, for every sample.
    """
    kept = {a for dim in dims for a in atoms(dim)}
    found: dict[Label, None] = {}
    certain = True
    for name, factors in given.items():
        for factor in factors:
            known = known_of(factor, labels.operands[name], sizes)
            gone = [a for a, along in known.items() if along is not None and a not in kept]
            found |= dict.fromkeys(a for a in gone if labels.roles.get(a) in _USING)
            numbered = [known[a] for a in gone if numbers_positions(known[a])]
            # (an index that samples alone give up is not there where no sample has it)
            hidden = not numbered and any(numbers_positions(along) for a, along in known.items() if a in kept)
            certain &= not gone or hidden or (bool(numbered) and all(map(is_nonempty, numbered)))
    return () if certain else tuple(found)


def _with_results_of_nothing(
    call: Bound, labels: Labels, gone: Sequence[Label], record: AnyRecord, number: int, nothing: Tensor
) -> AnyRecord:
    """A result of a call, with the operator's own for an empty dimension where it is made of nothing along `gone`."""
    if call.rule.category is ATTENTION and not isinstance(record, Dense):  # (its rows are those of the queries)
        return zero_where(record, nothing)
    if not isinstance(record, Dense):
        raise NotLowered("samples without positions have results of their own, on dense storage")
    instead = _of_nothing(call, labels, gone)
    if instead is None:
        return record
    return where_nothing(record, nothing, instead[number] if isinstance(instead, (list, tuple)) else instead)


def _of_nothing(call: Bound, labels: Labels, gone: Sequence[Label]) -> Any:
    """The results of a call whose operands have no element along these labels; None if it has none."""
    changed: dict[str, Any] = {}
    for name, tensor in call.tensors.items():
        for dim, label in enumerate(labels.operands.get(name, ())):
            if isinstance(label, tuple) and not set(label).isdisjoint(gone):
                return None
            if label in gone and label is not None:
                tensor = _without_elements(tensor, dim)
                changed[name] = tensor
    if callable(call.rule.traits.identity) or any(r.name == "indices" for r in call.op._schema.returns):
        return None  # (an extreme of nothing: torch would raise, and say so in a graph's log)
    emptied = call.with_tensors(changed)
    if any(isinstance(t, (Sparse, Permuted)) for t in emptied.tensors.values()):
        raise NotLowered("samples without positions have results of their own, on dense storage")
    try:
        return emptied.run()
    except (IndexError, RuntimeError, ValueError, MaskedSemanticsError):
        return None


def _without_elements(tensor: Any, dim: int) -> Any:
    """An operand without elements along a dimension, and so without a gradient."""
    if isinstance(tensor, Tensor):
        return tensor.detach().narrow(dim, 0, 0)
    if not isinstance(tensor, Dense):
        return Dense(torch.empty(with_size(tensor.shape, dim, 0), dtype=tensor.dtype, device=tensor.device))
    validity = tensor.full_validity
    return Dense(tensor.data.detach().narrow(dim, 0, 0), None if validity is None else validity.narrow(dim, 0, 0))


def without_any(factors: Sequence[Factor], number: int, result: Sequence[Factor]) -> Tensor | None:
    """Where a result is there and has nothing: none of its operands' elements are; None if each is known to have some.

    factors  of the operands, with the dimensions of the result and `number` more: those that are used up
    result   of the result
    """
    there = as_bool(where_all(factors))
    nothing = there.any(tuple(range(there.ndim - number, there.ndim))).logical_not()
    if result:
        nothing = nothing & as_bool(where_all(result))
    return None if may_be_read(nothing) and not bool(nothing.any()) else nothing


def where_nothing(record: Dense, nothing: Tensor, instead: Dense) -> Dense:
    """A result, and `instead`, where it is valid and a number, in place of what has nothing."""
    given = instead.full_validity
    if given is not None:
        nothing = nothing & as_bool(given)
    if instead.data.is_floating_point() or instead.data.is_complex():
        nothing = nothing & instead.data.isnan().logical_not()
    nothing = nothing.expand(record.shape)
    return Dense(torch.where(nothing, instead.data, record.data), unite(record.full_validity, nothing))
