"""Packed sequences: what pack_padded_sequence, pad_packed_sequence and pad_sequence do.

Law: a step moves with its validity, and padding is valid. Lengths have to be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    MOVEMENT,
    Dense,
    MaskedSemanticsError,
    Number,
    aligned_validity,
    all_valid,
    expand_validity,
    joinable_validities,
    known_all_valid,
    masked_rule,
    packet_name,
)

aten = torch.ops.aten


def known_sizes(op: OpOverload, sizes: Dense) -> Tensor:
    """Lengths of sequences, or how many of them have each step: all of them have to be known."""
    if not known_all_valid(sizes):
        raise MaskedSemanticsError(
            f"{packet_name(op)} has no meaning with invalid lengths (shape {tuple(sizes.shape)}): nothing says where a "
            "sequence ends. Fill them first with x.to_tensor(value)."
        )
    return sizes.data


@masked_rule(aten._pack_padded_sequence.default, category=MOVEMENT, plain=(1,))
def _pack_padded_sequence(input: Dense, lengths: Dense, batch_first: bool) -> tuple[Dense, Tensor]:
    """The steps of each row up to its length, and how many rows have each."""
    sizes = known_sizes(aten._pack_padded_sequence.default, lengths)
    data, batch_sizes = aten._pack_padded_sequence(input.data, sizes, batch_first)
    v = aligned_validity(input)
    if v is not None:
        v = aten._pack_padded_sequence(expand_validity(v, input.shape, [0, 1]), sizes, batch_first)[0]
    return Dense(data, v), batch_sizes


@masked_rule(aten._pad_packed_sequence.default, category=MOVEMENT, plain=(1,))
def _pad_packed_sequence(
    data: Dense, batch_sizes: Dense, batch_first: bool, padding_value: Number, total_length: int
) -> tuple[Dense, Tensor]:
    """The packed steps, and padding, which is valid."""
    sizes = known_sizes(aten._pad_packed_sequence.default, batch_sizes)
    padded, lengths = aten._pad_packed_sequence(data.data, sizes, batch_first, padding_value, total_length)
    v = aligned_validity(data)
    if v is not None:
        v = aten._pad_packed_sequence(expand_validity(v, data.shape, [0]), sizes, batch_first, 1, total_length)[0]
    return Dense(padded, v), lengths


@masked_rule(aten.pad_sequence.default, category=MOVEMENT)
def pad_sequence(
    sequences: Sequence[Dense], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Dense:
    """Sequences side by side, and padding, which is valid."""
    data = aten.pad_sequence([x.data for x in sequences], batch_first, padding_value, padding_side)
    if all_valid(*sequences):
        return Dense(data)
    return Dense(data, aten.pad_sequence(joinable_validities(sequences, along=0), batch_first, 1, padding_side))
