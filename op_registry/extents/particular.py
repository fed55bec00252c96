"""Operators whose dimensions do not say all: what they do depends on where a position is, or on how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels, atoms
from op_registry.dimensions.movements import Unknown
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import along_dim, conjunction, factors_of, there, where_all, with_size
from op_registry.extents.follow import any_stored, followed, records_of, refuse, without
from op_registry.records.dense import Dense
from op_registry.records.extent import Factor, Positions, as_positions, is_prefix
from op_registry.records.tracing import assert_when_run, may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect, unite
from op_registry.rule import Run, packet_name
from op_registry.sparse.record import NotLowered


def check_counts(call: Bound, labels: Labels) -> None:
    """Refuse what counts positions from 0 along dimensions where samples do not begin there.

    An argument may count them of several operands, as ``is_causal`` does queries and keys: then it is enough that all
    have their samples at the same places. (Packed rows are compared by their places in the sample.)
    """
    records = records_of(call)
    own = {a for a, role in labels.roles.items() if role == "counted"}
    counted = {"": own} | {n: {*counts} for n, counts in labels.counts.items() if call.named.get(n) is True}
    for name, of in counted.items():
        given = []
        for operand, record in records.items():
            dims = [d for d, dim in enumerate(labels.operands[operand]) if not of.isdisjoint(atoms(dim))]
            if not name or (len(dims) == 1 and isinstance(record, Dense)):
                given.append([(f, d) for f in factors_of(record) for d in f.positions if d in dims])
        if all(is_prefix(f.along[d]) for factors in given for f, d in factors):
            continue
        if not name or not _same([[f for f, _ in factors] for factors in given]):
            what = f"{name} counts positions" if name else "it counts positions"
            raise refuse(call, f"{what} from 0, where samples do not begin; see masked_dispatch.align")


def _same(operands: Sequence[Sequence[Factor]]) -> bool:
    """Whether the factors of each operand say the same."""
    if not all(operands):
        return False
    first, *others = map(where_all, operands)
    return all(first is other or (first.shape == other.shape and torch.equal(first, other)) for other in others)


def check_lengths(call: Bound) -> None:
    """Refuse lengths of pack_padded_sequence by which a sequence has steps that are not there."""
    if packet_name(call.op) != "_pack_padded_sequence":
        return
    record, lengths, batch_first = call["input"], call["lengths"], call["batch_first"]
    steps = where_all(factors_of(record))
    steps = steps.reshape(steps.shape[:2]).expand(record.shape[:2])
    packed = call.op(steps, lengths.data if isinstance(lengths, Dense) else lengths, batch_first)[0]
    text = (
        f"pack_padded_sequence: by its lengths, sequences of the batch of shape {tuple(record.shape)} have steps that "
        "are not there. Lengths count from the first step; masked_dispatch.align moves each sequence there, and "
        "masked_dispatch.interop.to_packed_sequence takes the lengths that the batch knows."
    )
    if not may_be_read(packed):
        assert_when_run(packed == 1, text)
    elif not bool(packed.all()):
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
    read, counting = dict(dims.reads), dims.counts
    extents = {name: r.extent for name, r in records_of(call).items() if r.extent is not None}
    factors = [(name, f) for name, extent in extents.items() for f in extent.factors]
    if not all(name in read and (read[name] is None or {*f.depends} <= {*(read[name] or ())}) for name, f in factors):
        return False
    if counting and not all(is_prefix(f.along[d]) for _, f in factors for d in f.positions):
        raise refuse(
            call, "its lengths count from the start of the batch, where samples do not begin; see masked_dispatch.align"
        )
    return True
