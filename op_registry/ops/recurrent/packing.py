"""Packed sequences: the operators of pack_padded_sequence, pad_packed_sequence and pad_sequence.

Law: a step moves with its validity. The padding of a batch that was packed is not there: the result knows the length of
each sequence, and `padding_value` lies under its mask. The padding that pad_sequence adds is valid, because the caller
chose its number; `masked_dispatch.pad_sequence` adds padding that is not there. An invalid length is refused: it is
unknown then where a sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry import extents
from op_registry.authoring import (
    MOVEMENT,
    Dense,
    MaskedSemanticsError,
    Number,
    Unknown,
    aligned_validity,
    known_all_valid,
    masked_rule,
    packet_name,
)
from op_registry.records.layout import expand_validity, joinable_validities

aten = torch.ops.aten


def known_sizes(op: OpOverload, sizes: Dense) -> Tensor:
    """The lengths of sequences, or the batch size of each step, all of which must be valid."""
    if not known_all_valid(sizes):
        raise MaskedSemanticsError(
            f"{packet_name(op)} has no meaning with invalid lengths (shape {tuple(sizes.shape)}): it is unknown where "
            "a sequence ends. Fill them first with x.to_tensor(value)."
        )
    return sizes.data


@masked_rule(
    aten._pack_padded_sequence.default,
    category=MOVEMENT,
    plain=(1,),
    dims=Unknown(
        "sequences of several lengths are packed into one dimension",
        reads=(("input", (0, 1)),),
        lengths=(("input", "lengths"),),
    ),
)
def _pack_padded_sequence(input: Dense, lengths: Dense, batch_first: bool) -> tuple[Dense, Tensor]:
    """The steps of each row up to its length, and the batch size of each step."""
    sizes = known_sizes(aten._pack_padded_sequence.default, lengths)
    data, batch_sizes = aten._pack_padded_sequence(input.data, sizes, batch_first)
    v = aligned_validity(input)
    if v is not None:
        v = aten._pack_padded_sequence(expand_validity(v, input.shape, [0, 1]), sizes, batch_first)[0]
    return Dense(data, v), batch_sizes


@masked_rule(
    aten._pad_packed_sequence.default,
    category=MOVEMENT,
    plain=(1,),
    dims=Unknown("sequences of several lengths are packed into one dimension"),
)
def _pad_packed_sequence(
    data: Dense, batch_sizes: Dense, batch_first: bool, padding_value: Number, total_length: int
) -> tuple[Dense, Tensor]:
    """The packed steps, with padding that is not there."""
    sizes = known_sizes(aten._pad_packed_sequence.default, batch_sizes)
    padded, lengths = aten._pad_packed_sequence(data.data, sizes, batch_first, padding_value, total_length)
    v = aligned_validity(data)
    if v is not None:
        v = aten._pad_packed_sequence(expand_validity(v, data.shape, [0]), sizes, batch_first, 0, total_length)[0]
    return extents.of_lengths(Dense(padded, v), lengths.to(padded.device), batch_first), lengths


@masked_rule(
    aten.pad_sequence.default,
    category=MOVEMENT,
    torch_if_valid=True,
    dims=Unknown("sequences of several lengths are packed into one dimension"),
)
def pad_sequence(
    sequences: Sequence[Dense], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Dense:
    """Sequences side by side, with valid padding."""
    data = aten.pad_sequence([x.data for x in sequences], batch_first, padding_value, padding_side)
    return Dense(data, aten.pad_sequence(joinable_validities(sequences, along=0), batch_first, 1, padding_side))
