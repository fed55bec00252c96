"""Convert from and to torch's PackedSequence, which stores sequences of different lengths by time steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from masked_dispatch.interop.crossing import filled, takes
from masked_dispatch.interop.padding import to_lengths, with_positions
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(packed=PackedSequence, instead="pass torch.nn.utils.rnn.pack_sequence(tensors), or use pad_sequence(tensors)")
def from_packed_sequence(
    packed: PackedSequence, batch_first: bool = False, total_length: int | None = None
) -> MaskedTensor:
    """Convert to one batch, (T, B, …) or (B, T, …) with `batch_first`, invalid after each sequence; differentiable.

    total_length  pad to this T, by default the longest sequence's

    Raises torch's ValueError if `total_length` is too short.
    """
    padded, lengths = pad_packed_sequence(packed, batch_first=True, total_length=total_length)
    positions = torch.arange(padded.shape[1]) < lengths[:, None]
    batch = with_positions(padded, positions.to(padded.device), "p")
    return batch if batch_first else batch.transpose(0, 1)  # type: ignore[return-value]


@takes(x=Tensor)
def to_packed_sequence(x: Tensor, batch_first: bool = False, enforce_sorted: bool = False) -> PackedSequence:
    """Pack the valid positions of a batch, (T, B, …) or (B, T, …) with `batch_first`; differentiable.

    enforce_sorted  require sequences in descending order of length, as ONNX does

    The result drops positions after the longest sequence; `total_length` restores them.

    Raises ValueError if the valid positions are not the first ones of a sequence, one is partly valid, or a sequence
    has none; torch's RuntimeError for an unsorted batch with `enforce_sorted`.
    """
    if x.ndim < 2:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is not a batch of sequences, (T, B, ...) or (B, T, ...)")
    batch = x if batch_first else x.transpose(0, 1)
    lengths = to_lengths(batch).cpu()
    if not lengths.all():
        row = int((lengths == 0).nonzero()[0])
        raise ValueError(
            f"sequence {row} has no valid position, and a PackedSequence cannot hold a sequence of length 0: leave "
            f"it out of the batch, {'x[lengths > 0]' if batch_first else 'x[:, lengths > 0]'}"
        )
    return pack_padded_sequence(filled(batch), lengths, batch_first=True, enforce_sorted=enforce_sorted)
