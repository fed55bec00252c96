"""Operators whose dimensions do not say all: what they do depends on where a position is, or on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from op_registry.bound import Bound
from op_registry.dimensions.labels import Labels
from op_registry.errors import MaskedSemanticsError
from op_registry.extents.factors import (
    Factor,
    Positions,
    along_dim,
    as_positions,
    conjunction,
    factors_of,
    is_prefix,
    there,
    where_all,
    with_size,
)
from op_registry.extents.follow import any_stored, depends_at, followed, records_of, refuse, without
from op_registry.records.dense import Dense
from op_registry.records.tracing import assert_when_run, may_be_read
from op_registry.records.validity import as_bool, as_int8, intersect, unite
from op_registry.rule import Run, packet_name
from op_registry.sparse.record import NotLowered


def triangle(call: Bound, labels: Labels, run: Run) -> Any:
    """tril and triu: rows and columns count from 0, as samples do that begin there."""
    record = next(iter(records_of(call).values()))
    if not all(is_prefix(f.along[d]) for f in factors_of(record) for d in f.positions if d >= record.ndim - 2):
        raise refuse(call, "it counts rows and columns from 0, where samples do not begin; see masked_dispatch.align")
    return followed(call, labels, call.applied(run))


def attended(call: Bound, labels: Labels, run: Run) -> Any:
    """Attention: with is_causal, a query may attend to the keys up to its own place in the sample."""
    if call.named.get("is_causal"):
        query, *others = (_places(call.named[name]) for name in ("query", "key", "value"))
        given = [p for p in (query, *others) if p is not None]
        in_front = all(is_prefix(f.along[-2]) for p in given for f in p)
        if not in_front and not all(_same(query, other) for other in others):
            raise refuse(
                call, "is_causal counts queries and keys from 0, where samples do not begin; see masked_dispatch.align"
            )
    return followed(call, labels, call.applied(run))


def crossed(call: Bound, labels: Labels, run: Run) -> Any:
    """cross: its three positions are coordinates, which a sample has all or none of."""
    if depends_at(call, labels, "each"):
        raise refuse(call, "a vector that lies in padding in part has no product; it is not the sample's own")
    return followed(call, labels, call.applied(run))


def _places(record: Any) -> list[Factor] | None:
    """The factors of queries or keys that number them."""
    if not isinstance(record, Dense):
        return None
    return [f for f in factors_of(record) if record.ndim - 2 in f.positions] or None


def _same(a: list[Factor] | None, b: list[Factor] | None) -> bool:
    if a is None or b is None:
        return False
    first, second = where_all(a), where_all(b)
    return first is second or (first.shape == second.shape and torch.equal(first, second))


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
    """trapezoid: intervals between neighbours; the integral over one position or none is 0, as torch has it."""
    record = next(iter(records_of(call).values()))
    dim = call["dim"] % record.ndim
    known = [as_positions(f.along[dim]) for f in factors_of(record) if f.along[dim] is not None]
    if not all(isinstance(along, Positions) and along.contiguous for along in known):
        raise refuse(
            call, f"its intervals along dimension {dim} would lie between positions of a sample that follow no other"
        )
    result: Dense = call.applied(run)
    counted: Tensor | None = along_dim(record, dim)
    if counted is not None and result.validity is not None:
        few = as_int8(counted.expand(with_size(counted.shape, dim, record.shape[dim])).sum(dim) <= 1)
        others = conjunction(without(record, [dim]))  # (whether the row is there)
        few = few if others is None else intersect(few, others.narrow(dim, 0, 1).squeeze(dim))
        data = torch.where(as_bool(result.validity), result.data, 0)
        result = Dense(data, unite(result.validity, few))
    return followed(call, labels, result)


# Operators whose dimensions cannot be stated, which read along some dimensions of an operand what is valid, and give
# one result for all of it: their operands, each with those dimensions (None: all of them).
_READ: Mapping[str, Mapping[str, Collection[int] | None]] = {
    "pack_padded_sequence": {"input": (0, 1)},
    "embedding_bag": {"indices": None, "per_sample_weights": None},
    "ctc_loss": {"log_probs": (0, 1), "targets": None},
}


# Of these, the ones whose lengths count positions from the first index.
_COUNTING = ("ctc_loss",)


def reads_what_is_valid(call: Bound) -> bool:
    """Whether what is not there is what the call does not read: padding in bags, steps after a sample's last."""
    name_of_op = packet_name(call.op).removeprefix("_")
    read = _READ.get(name_of_op, {})
    extents = {name: r.extent for name, r in records_of(call).items() if r.extent is not None}
    factors = [(name, f) for name, extent in extents.items() for f in extent.factors]
    if not all(name in read and (read[name] is None or {*f.depends} <= {*(read[name] or ())}) for name, f in factors):
        return False
    if name_of_op in _COUNTING and not all(is_prefix(f.along[d]) for _, f in factors for d in f.positions):
        raise refuse(
            call, "its lengths count from the start of the batch, where samples do not begin; see masked_dispatch.align"
        )
    return True


BY_NAME: Mapping[str, Callable[[Bound, Labels, Run], Any]] = {
    "cross": crossed,
    "linalg_cross": crossed,
    "tril": triangle,
    "triu": triangle,
    "scaled_dot_product_attention": attended,
    "_scaled_dot_product_attention_math": attended,
    "_scaled_dot_product_flash_attention_for_cpu": attended,
    "multilabel_margin_loss": listed_classes,
    "trapezoid": integrated,
    "trapz": integrated,
}
