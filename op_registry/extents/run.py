"""Run a rule where operands have extents: the results get theirs, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels, atoms
from op_registry.dimensions.movements import AtIndices, Indexed, Joined, OfSizes, Unknown
from op_registry.dimensions.views import Reshaped, View
from op_registry.errors import MaskedSemanticsError
from op_registry.extents import indices, joins, samples, slices, states
from op_registry.extents.factors import (
    along_dim,
    any_along,
    conjunction,
    factors_of,
    index_along,
    there,
    where_all,
    with_extent,
    with_size,
)
from op_registry.extents.follow import (
    any_stored,
    depends_at,
    followed,
    given_of,
    records_of,
    refuse,
    roles_of_positions,
    sizes_of,
    without,
)
from op_registry.extents.meetings import begins_elsewhere, check_joined
from op_registry.extents.remembered import remembered
from op_registry.laws.categories import ASSIGNMENT, CHOICE, ELEMENTWISE, QUERY, RECURRENT, REFUSED
from op_registry.laws.whole_slices import WHOLE_SLICES
from op_registry.records.dense import Dense
from op_registry.records.extent import Factor, Positions, as_positions, is_prefix
from op_registry.records.tracing import assert_when_run, may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect, unite
from op_registry.resolve import resolve
from op_registry.rule import Rule, Run
from op_registry.sparse.permuted import RECORDS
from op_registry.sparse.record import NotLowered

aten = torch.ops.aten

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
        if reads_what_is_valid(call):
            check_lengths(call)
            results = call.map(lambda record: Dense(record.data, record.validity), Dense).applied(run)
            return rows_of_bags(call, results) if "offsets" in call.named else results
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
    check_counts(call, labels)
    follower = _follower(call, labels)
    if follower in _ON_DENSE and any_stored(call):
        raise NotLowered("it works within each sample, on dense storage")
    result = follower(call, labels, run)
    if follower in _OF_STATES or not states.any_states(records_of(call).values()):
        return result
    return states.kept(call, labels, result)


def _follower(call: Bound, labels: Labels) -> Follower:
    """What runs the call: it depends on what the operator does along dimensions that matter to an extent."""
    category, roles = call.rule.category, roles_of_positions(call, labels)
    if category is WHOLE_SLICES and roles - {None}:
        raise refuse(call, "a slice that lies in padding in part has no result; it is not the sample's own")
    follower = _of_statement(call, labels) or _along_positions(call, labels, roles)
    if follower is not None:
        return follower
    if category is RECURRENT and roles & {"contracted", "each"}:
        raise refuse(call, "its features, or its layers, would differ from sample to sample")
    if category is ELEMENTWISE and depends_at(call, labels, "each"):
        raise refuse(call, "a vector that lies in padding in part has no product; it is not the sample's own")
    if category is RECURRENT and "scanned" not in labels.roles.values():
        return states.of_cell
    if call.rule.name == "multilabel_margin_loss":
        return listed_classes
    if roles & {"parameter", "indexed", "selected"}:
        raise refuse(call, "it may read positions of other samples")
    return _ordinary


def _of_statement(call: Bound, labels: Labels) -> Follower | None:
    """What runs a call whose category, or statement, says all."""
    dims, category = call.rule.dims, call.rule.category
    if category is CHOICE:
        return states.chosen
    if category is ASSIGNMENT or (isinstance(dims, Indexed) and dims.writes):
        return indices.written
    if isinstance(dims, Joined):
        return joins.joined
    if isinstance(dims, (Indexed, AtIndices)):
        return indices.looked_up
    if isinstance(dims, View) and depends_at(call, labels, "selected"):
        return slices.selected
    if call.rule.name.startswith("unsqueeze"):
        return joins.unsqueezed
    return None


def _along_positions(call: Bound, labels: Labels, roles: set[str | None]) -> Follower | None:
    """What runs a call that acts on each sample's own positions, or along dimensions that number samples."""
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
    if "reduced" in map(labels.roles.get, labels.windows):
        return integrated
    return None


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


# ------------------------------------------------------------------------------------------- what dimensions do not say


def check_counts(call: Bound, labels: Labels) -> None:
    """Refuse what counts positions from 0 along dimensions where samples do not begin there: bounds of a write, too.

    An argument may count them of several operands, as ``is_causal`` does queries and keys: then it is enough that all
    have their samples at the same places. (Packed rows are compared by their places in the sample.)
    """
    counting = ("counted", "selected") if call.rule.category is ASSIGNMENT else ("counted",)
    counted = {n: {*counts} for n, counts in labels.counts.items() if call.named.get(n) is True}
    own = {a for a, role in labels.roles.items() if role in counting}
    for name, of in (counted | {"": own} if own else counted).items():
        given = []
        for operand, record in records_of(call).items():
            dims = [d for d, dim in enumerate(labels.operands[operand]) if not of.isdisjoint(atoms(dim))]
            if not name or (len(dims) == 1 and isinstance(record, Dense)):
                given.append([(f, d) for f in factors_of(record) for d in f.positions if d in dims])
        if all(is_prefix(f.along[d]) for factors in given for f, d in factors):
            continue
        if not name or not _same([[f for f, _ in factors] for factors in given]):
            why = "counts from the start of the batch, where samples do not begin; see masked_dispatch.align"
            raise refuse(call, f"{name or 'it'} {why}")


def _same(operands: Sequence[Sequence[Factor]]) -> bool:
    """Whether the factors of each operand say the same."""
    if not all(operands):
        return False
    first, *others = map(where_all, operands)
    return all(first is other or (first.shape == other.shape and torch.equal(first, other)) for other in others)


def check_lengths(call: Bound) -> None:
    """Refuse lengths by which a sequence has steps that are not there."""
    assert isinstance(call.rule.dims, Unknown)
    for name, argument in call.rule.dims.lengths:
        record, lengths = call[name], call[argument]
        factors = [(f, d) for f in factors_of(record) for d in f.positions if d < 2]
        if record.ndim < 2 or not factors:
            continue
        steps, time = where_all([f for f, _ in factors]), factors[0][1]
        number = lengths.filled(0) if isinstance(lengths, Dense) else torch.tensor(lengths)
        number = number.reshape(-1).to(record.device).unsqueeze(time)
        index = index_along(time, record.shape[time], 2, record.device)
        fits = as_bool(any_along(steps, range(2, steps.ndim)).reshape(steps.shape[:2])) | (index >= number)
        text = (
            f"{call.rule.name.lstrip('_')}: by {argument}, sequences of the batch of shape {tuple(record.shape)} have "
            "steps that are not there. Lengths count from the first step; masked_dispatch.align moves each sequence "
            "there, and `extent` of the batch knows how many it has."
        )
        if not may_be_read(fits):
            assert_when_run(fits, text)
        elif not bool(fits.all()):
            raise MaskedSemanticsError(text)


def listed_classes(call: Bound, labels: Labels, run: Run) -> Any:
    """multilabel_margin_loss: a list of classes ends at the first -1, or where there is no more of it."""
    name, target = list(records_of(call).items())[1]
    if target.extent is None:
        return followed(call, labels, call.applied(run))
    if any_stored(call):
        raise NotLowered("its list of classes ends where the sample does, on dense storage")
    given = there(target)
    validity = target.full_validity
    ended = Dense(
        torch.where(given, target.data, -1),
        None if validity is None else as_int8(as_bool(validity) | ~given),
        target.extent,
    )
    return followed(call, labels, call.with_(**{name: ended}).applied(run))


def integrated(call: Bound, labels: Labels, run: Run) -> Any:
    """Sums over the intervals between neighbours: over one position or none they are 0, as torch has it."""
    name, record = next(iter(records_of(call).items()))
    ((label, window),) = labels.windows.items()
    dim = labels.operands[name].index(label)
    known = [as_positions(f.along[dim]) for f in factors_of(record) if f.along[dim] is not None]
    if not all(isinstance(along, Positions) and along.contiguous for along in known):
        raise refuse(
            call, f"its intervals along dimension {dim} would lie between positions of a sample that follow no other"
        )
    result: Dense = call.applied(run)
    counted: Tensor | None = along_dim(record, dim)
    if counted is not None and result.validity is not None:
        few = as_int8(counted.expand(with_size(counted.shape, dim, record.shape[dim])).sum(dim) < window.size)
        others = conjunction(without(record, [dim]))  # (whether the row is there)
        few = few if others is None else intersect(few, others.narrow(dim, 0, 1).squeeze(dim))
        data = torch.where(as_bool(result.validity), result.data, 0)
        result = Dense(data, unite(result.validity, few))
    return followed(call, labels, result)


def reads_what_is_valid(call: Bound) -> bool:
    """Whether what is not there is what the call does not read: padding in bags, steps after a sample's last."""
    dims = call.rule.dims
    if not isinstance(dims, Unknown):
        return False
    read = dict(dims.reads)
    extents = {name: r.extent for name, r in records_of(call).items() if r.extent is not None}
    factors = [(name, f) for name, extent in extents.items() for f in extent.factors]
    return all(name in read and (read[name] is None or {*f.depends} <= {*(read[name] or ())}) for name, f in factors)


def rows_of_bags(call: Bound, results: Sequence[Dense]) -> Sequence[Dense]:
    """The results for bags that are the rows of a table of indices: there where a position of the row is."""
    (summed, *others), indices, starts = results, call["indices"], call["offsets"].data
    bags = summed.shape[0]
    if not isinstance(indices, Dense) or indices.extent is None or not bags or indices.shape[0] % bags:
        return results
    width = indices.shape[0] // bags
    some = there(indices).expand(indices.shape).view(bags, width).any(1, keepdim=True)
    are_rows = starts[:bags] == width * index_along(0, bags, 1, starts.device)
    if not may_be_read(are_rows):
        assert_when_run(are_rows, f"embedding_bag: in a graph, {bags} bags of a padded batch are rows of one length")
    elif not bool(are_rows.all()):
        return results
    rows = _with_extents(aten.amax.default, _with_extents(aten.view.default, indices, [bags, width]), [1])
    if rows.extent is not None:
        rows = _with_extents(aten.expand.default, _with_extents(aten.unsqueeze.default, rows, 1), summed.shape)
        summed = with_extent(summed, rows.extent)
    elif summed.validity is not None:  # a bag of nothing is 0
        summed = Dense(torch.where(some, summed.data, 0), as_int8(as_bool(summed.validity) | ~some))
    return summed, *others


def _with_extents(op: OpOverload, *args: Any) -> Any:
    rule = resolve(op).rule
    assert rule is not None
    return run_with_extents(rule.bind(op), rule, op, *args)
