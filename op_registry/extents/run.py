"""Run a rule where operands have extents: the results get theirs, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels, atoms
from op_registry.dimensions.movements import AtIndices, Indexed, Joined, OfSizes
from op_registry.dimensions.views import Reshaped, View
from op_registry.extents import indices, joins, particular, samples, slices, states
from op_registry.extents.combine import check_joined
from op_registry.extents.factors import with_extent
from op_registry.extents.follow import (
    any_stored,
    depends_at,
    followed,
    given_of,
    records_of,
    refuse,
    roles_of_positions,
    sizes_of,
)
from op_registry.extents.regroup import begins_elsewhere
from op_registry.extents.remembered import remembered
from op_registry.laws.categories import ASSIGNMENT, CHOICE, ELEMENTWISE, QUERY, RECURRENT, REFUSED
from op_registry.laws.whole_slices import WHOLE_SLICES
from op_registry.records.dense import Dense
from op_registry.rule import Rule, Run, packet_name
from op_registry.sparse.permuted import RECORDS
from op_registry.sparse.record import NotLowered

# Runs a call with the labels of its dimensions, and gives the results their extents.
Follower = Callable[[Bound, Labels, Run], Any]


def has_extent(values: Iterable[object]) -> bool:
    """Whether a record in `values`, or in lists in it, knows which of its positions are there."""
    for v in values:
        if isinstance(v, RECORDS):
            if v.extent is not None:
                return True
        elif isinstance(v, (list, tuple)) and has_extent(v):
            return True
    return False


def run_with_extents(run: Run, rule: Rule, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The results of a rule's run, with the extents that follow from the operands'.

    Raises MaskedSemanticsError where this is not certain, NotLowered where it needs dense storage.
    """
    if rule.category is QUERY or rule.category is REFUSED or isinstance(rule.dims, OfSizes):
        return run(*args, **kwargs)
    return remembered(run, rule, op, args, kwargs, _outcome)


def _outcome(run: Run, rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same, whose validity is still the rule's."""
    call = Bound.of(rule, op, args, kwargs)
    if isinstance(rule.dims, Reshaped):
        return joins.reshaped(call, run)
    labels = call.labels
    if labels is None:
        if particular.reads_what_is_valid(call):
            particular.check_lengths(call)
            return call.map(lambda record: Dense(record.data, record.validity), Dense).applied(run)
        dims = rule.dims
        if dims is not None:  # an operator's own errors come first
            call.map(lambda record: with_extent(record, None), RECORDS).applied(run)
        why = "its rule does not state its dimensions" if dims is None else f"of its dimensions, {dims}"
        raise refuse(call, why)
    if _splits_unordered(call, labels):
        raise refuse(
            call, "groups of positions are those of the batch, where samples do not begin; see masked_dispatch.align"
        )
    if not isinstance(rule.dims, View):  # (which combines nothing)
        check_joined(labels, given_of(records_of(call)), sizes_of(call, labels), rule.name)
    particular.check_counts(call, labels)
    follower = _follower(call, labels)
    if follower in _ON_DENSE and any_stored(call):
        raise NotLowered("it works within each sample, on dense storage")
    result = follower(call, labels, run)
    if follower in _OF_STATES or not states.any_states(records_of(call).values()):
        return result
    return states.kept(call, labels, result)


def _follower(call: Bound, labels: Labels) -> Follower:
    """What runs the call: it depends on what the operator does along dimensions that matter to an extent."""
    dims, category = call.rule.dims, call.rule.category
    roles = roles_of_positions(call, labels)
    if category is CHOICE:
        return states.chosen
    if category is ASSIGNMENT:
        return indices.written
    if isinstance(dims, Joined):
        return joins.joined
    if isinstance(dims, Indexed) and dims.writes:
        return indices.written
    if isinstance(dims, (Indexed, AtIndices)):
        return indices.looked_up
    if isinstance(dims, View) and depends_at(call, labels, "selected"):
        return slices.selected
    if packet_name(call.op).startswith("unsqueeze"):
        return joins.unsqueezed
    if depends_at(call, labels, "moved"):
        return samples.moved
    if depends_at(call, labels, "front"):
        return samples.sorted_to_the_front
    if "window" in labels.roles.values() and _has_windows_of_its_own(call, labels):
        raise refuse(call, "windows of each sample's own size would give results of other sizes")
    if labels.windows and depends_at(call, labels, "window"):
        return samples.in_whole_windows
    if "window" in roles:
        return samples.windowed
    if category is WHOLE_SLICES and roles - {None}:
        raise refuse(call, "a slice that lies in padding in part has no result; it is not the sample's own")
    if category is RECURRENT and roles & {"contracted", "each"}:
        raise refuse(call, "its features, or its layers, would differ from sample to sample")
    if category is RECURRENT and "scanned" not in labels.roles.values():
        return states.of_cell
    if category is ELEMENTWISE and depends_at(call, labels, "each"):
        raise refuse(call, "a vector that lies in padding in part has no product; it is not the sample's own")
    if "reduced" in map(labels.roles.get, labels.windows):
        return particular.integrated
    if call.rule.name == "multilabel_margin_loss":
        return particular.listed_classes
    if roles & {"parameter", "indexed", "selected"}:
        raise refuse(call, "it may read positions of other samples")
    return _ordinary


def _splits_unordered(call: Bound, labels: Labels) -> bool:
    """Whether a dimension is split whose indices are positions of samples that are not known to begin at 0."""
    return any(
        begins_elsewhere(along) and len(atoms(dim)) > 1
        for name, record in records_of(call).items()
        if record.extent is not None
        for factor in record.extent.factors
        for along, dim in zip(factor.along, labels.operands[name], strict=True)
    )


def _has_windows_of_its_own(call: Bound, labels: Labels) -> bool:
    """Whether what is there differs along a dimension of the windows: one that a single operand has, of a kernel."""
    return any(
        labels.role_of(labels.operands[name][d]) == "contracted"
        and not any(labels.operands[name][d] in dims for other, dims in labels.operands.items() if other != name)
        for name, record in list(records_of(call).items())[1:]
        if record.extent is not None
        for d in record.extent.positions
    )


def _ordinary(call: Bound, labels: Labels, run: Run) -> Any:
    return followed(call, labels, call.applied(run))


# What moves elements of dense records.
_ON_DENSE = frozenset({samples.windowed, samples.in_whole_windows})
# What knows of which steps its results are states.
_OF_STATES = frozenset({joins.joined, joins.unsqueezed, states.chosen, slices.selected, states.of_cell})
