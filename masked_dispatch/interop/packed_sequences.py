"""Doors to torch's PackedSequence: sequences of different lengths, one time step after another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from masked_dispatch.interop.crossing import as_masked, filled, takes
from masked_dispatch.interop.padding import to_lengths, with_positions
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(packed=PackedSequence, instead="pass torch.nn.utils.rnn.pack_sequence(tensors), or use pad_sequence(tensors)")
def from_packed_sequence(
    packed: PackedSequence, batch_first: bool = False, total_length: int | None = None
) -> MaskedTensor:
    """The sequences as one batch, (T, B, …) or (B, T, …) with `batch_first`, invalid after their ends; differentiable.

    total_length  pad to this T; the longest sequence's if not given

    Raises torch's ValueError for a `total_length` that is too short.
    """
    padded, lengths = pad_packed_sequence(packed, batch_first=True, total_length=total_length)
    positions = torch.arange(padded.shape[1]) < lengths[:, None]
    batch = with_positions(as_masked(padded), positions.to(padded.device))
    return batch if batch_first else batch.transpose(0, 1)  # type: ignore[return-value]


@takes(x=Tensor)
def to_packed_sequence(x: Tensor, batch_first: bool = False, enforce_sorted: bool = False) -> PackedSequence:
    """The valid positions of a batch, (T, B, …) or (B, T, …) with `batch_first`, as sequences; differentiable.

    enforce_sorted  the sequences come sorted by length, descending, as ONNX needs them

    Positions after the end of the longest sequence are not kept; `total_length` hands them back.

    Raises ValueError where the valid positions are not the first ones of a sequence, where one is valid in part, or a
    sequence has none; torch's RuntimeError for an unsorted batch with `enforce_sorted`.
    """
    if x.ndim < 2:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is no batch of sequences, (T, B, …) or (B, T, …)")
    batch = x if batch_first else x.transpose(0, 1)
    lengths = to_lengths(batch).cpu()
    if not lengths.all():
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(
            f"sequence {row} has no valid position, and a PackedSequence no sequence of length 0: leave it out of the "
            f"batch, {'x[lengths > 0]' if batch_first else 'x[:, lengths > 0]'}"
        )
    return pack_padded_sequence(filled(batch), lengths, batch_first=True, enforce_sorted=enforce_sorted)
