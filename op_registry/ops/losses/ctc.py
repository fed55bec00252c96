"""Connectionist temporal classification: an alignment of a whole sequence with its targets.

Law: all or nothing for each sample of the batch, then reduced as losses. A sample depends on all classes of its first
`input_length` steps, on its first `target_length` targets, and on both lengths; padding beyond them is not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.authoring import (
    LOSS,
    WHOLE_SLICES,
    Bound,
    Dense,
    MaskedSemanticsError,
    Unknown,
    as_int8,
    by_rule,
    fill_where_invalid,
    for_each_slice,
    intersect,
    known_all_valid,
    masked_rule,
    on_device_of,
    whole_validity,
)
from op_registry.autocast import upcast_under_autocast
from op_registry.ops.losses.rules import MEAN, reduced

aten = torch.ops.aten

# Lengths are a list of numbers or a tensor, depending on the overload.
Lengths = Sequence[int] | Dense


OF_SEVERAL_LENGTHS = Unknown(
    "targets of several lengths lie in one dimension",
    reads=(("log_probs", (0, 1)), ("targets", None)),
    lengths=(("log_probs", "input_lengths"), ("targets", "target_lengths")),
)


@masked_rule(
    aten.ctc_loss,
    category=LOSS,
    takes_call=True,
    torch_if_valid=True,
    dims=OF_SEVERAL_LENGTHS,
)
def ctc_loss(c: Bound) -> Dense:
    """A mean divides each loss by its number of targets first, and then by the number of valid samples."""
    batched = c.log_probs.ndim == 3
    scores = c.log_probs if batched else c.log_probs.map(lambda t: t.unsqueeze(1))
    scores = scores.like(upcast_under_autocast(scores.data))
    form = aten._ctc_loss.Tensor if isinstance(c.input_lengths, Dense) else aten._ctc_loss.default
    loss, _ = by_rule(form, scores, c.targets, c.input_lengths, c.target_lengths, c.blank, c.zero_infinity)
    if c.zero_infinity:
        loss = loss.like(torch.where(loss.data == math.inf, 0, loss.data))
    if c.reduction == MEAN:
        number = as_record(c.target_lengths, loss).filled(0).clamp(min=1).to(loss.data)
        loss = loss.like(loss.data / number)
    return reduced(loss if batched else loss.map(lambda t: t.squeeze(0)), c.reduction)


@masked_rule(
    aten._ctc_loss,
    category=WHOLE_SLICES,
    takes_call=True,
    dims=OF_SEVERAL_LENGTHS,
)
def _ctc_loss(c: Bound) -> tuple[Dense, Dense]:
    """The loss of each sample, and the table of its alignments, of which torch fills in what the sample has."""
    log_probs, targets, input_lengths, target_lengths = c.log_probs, c.targets, c.input_lengths, c.target_lengths
    steps, samples, classes = log_probs.shape
    if targets.ndim == 1 and samples > 1:
        refuse_unknown_starts(target_lengths)
    inputs, labels = as_record(input_lengths, log_probs), as_record(target_lengths, log_probs)
    whole = intersect(inputs.validity, labels.validity)
    # An invalid length is replaced by that of a sample which reads every step, and has no targets.
    input_numbers, label_numbers = inputs.filled(steps), labels.filled(0)
    within = torch.arange(steps, device=log_probs.device).unsqueeze(-1) < input_numbers
    for part in (whole_validity(log_probs, (0, 2), within.unsqueeze(-1)), whole_targets(targets, label_numbers)):
        if part is not None:
            whole = intersect(whole, on_device_of(log_probs.data, part.reshape(-1)))
    kept = None if whole is None else intersect(whole.reshape(1, -1, 1), log_probs.validity)
    filled = c.with_(
        log_probs=fill_where_invalid(log_probs.data, kept, -math.log(max(classes, 1))),
        targets=targets.filled((c.blank + 1) % max(classes, 1)),
        input_lengths=input_lengths.filled(steps) if isinstance(input_lengths, Dense) else input_lengths,
        target_lengths=target_lengths.filled(0) if isinstance(target_lengths, Dense) else target_lengths,
    )
    losses, table = filled.applied(c.op)
    return for_each_slice(losses, whole, 1), filled_part(table, whole, input_numbers, label_numbers)


def as_record(lengths: Lengths, beside: Dense) -> Dense:
    """Lengths as a record of one dimension, beside the data that they are of."""
    if isinstance(lengths, Dense):
        return lengths.map(lambda t: t.reshape(-1).to(beside.device))
    return Dense(torch.tensor(list(lengths), dtype=torch.int64, device=beside.device))


def refuse_unknown_starts(target_lengths: Lengths) -> None:
    """Concatenated targets begin where those of the samples before them end."""
    if isinstance(target_lengths, Dense) and not known_all_valid(target_lengths):
        raise MaskedSemanticsError(
            "ctc_loss of concatenated targets has no meaning with an invalid target length: where the targets of the "
            "next sample begin is then unknown. Pad the targets to shape (samples, length), or fill the lengths "
            "first, target_lengths.to_tensor(0)."
        )


def whole_targets(targets: Dense, lengths: Tensor) -> Tensor | None:
    """Where the targets of each sample are whole, of those that its length counts."""
    if targets.validity is None:
        return None
    lengths = lengths.to(targets.device).unsqueeze(-1)
    starts = lengths.cumsum(0) - lengths if targets.ndim == 1 else torch.zeros_like(lengths)
    position = torch.arange(targets.shape[-1], device=targets.device)
    read = (starts <= position) & (position < starts + lengths)
    rows = targets if targets.ndim == 2 else targets.map(lambda t: t.expand(read.shape))
    return whole_validity(rows, (1,), read)


def filled_part(table: Tensor, whole: Tensor | None, inputs: Tensor, labels: Tensor) -> Dense:
    """The table of alignments, valid in the rows and columns that torch writes."""
    if whole is None:
        return Dense(table)
    row, column = (torch.arange(size, device=table.device) for size in table.shape[1:])
    within_rows = row < inputs.unsqueeze(-1)
    within_columns = column < 2 * labels.unsqueeze(-1) + 1
    written = within_rows.unsqueeze(-1) & within_columns.unsqueeze(-2)
    return Dense(table, intersect(for_each_slice(table, whole, 1).validity, as_int8(written)))
