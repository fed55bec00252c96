"""Convert from and to torch.nested, which stores tensors of different lengths without padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from masked_dispatch.interop.crossing import takes
from masked_dispatch.interop.padding import to_lengths, with_positions
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(nested=Tensor, instead="pass torch.nested.nested_tensor(tensors), or use pad_sequence(tensors)")
def from_nested_tensor(nested: Tensor, total_length: int | None = None) -> MaskedTensor:
    """Convert a jagged or strided nested tensor to a batch (B, T, …), invalid after each sequence; differentiable.

    total_length  pad to this T, by default the longest sequence's

    ``.to_packed()`` stores the result without its padding.

    Raises TypeError for a tensor that is not nested, ValueError if its parts differ in a dimension besides the first.
    """
    if not nested.is_nested:
        raise TypeError(
            f"from_nested_tensor takes a nested tensor, and this one of shape {tuple(nested.shape)} is not nested: "
            "pass it to masked_tensor"
        )
    parts = nested.unbind()
    if not parts:
        raise ValueError("a nested tensor without parts has no shape")
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1 or not parts[0].ndim:
        each = [tuple(part.shape) for part in parts[:3]]
        raise ValueError(
            f"the parts of the nested tensor have shapes {each}...; in a batch they differ in their first dimension "
            "only. Swap dimensions, or pad and mask it with from_lengths"
        )
    lengths = torch.tensor([len(part) for part in parts], device=nested.device)
    longest = max(len(part) for part in parts)
    padded = pad_sequence(list(parts), batch_first=True)
    if total_length is not None:
        if total_length < longest:
            raise ValueError(f"total_length={total_length} is less than the longest part, {longest}")
        padded = torch.cat([padded, padded.new_zeros(len(parts), total_length - longest, *padded.shape[2:])], 1)
    positions = torch.arange(padded.shape[1], device=nested.device) < lengths[:, None]
    return with_positions(padded, positions, "p")


@takes(x=Tensor)
def to_nested_tensor(x: Tensor) -> Tensor:
    """Convert the valid positions of a batch (B, T, …) to a jagged nested tensor; differentiable, from any storage.

    The result drops positions after the longest sequence; `total_length` restores them.

    Raises ValueError if the valid positions are not the first ones of a row, or one is partly valid.
    """
    lengths = to_lengths(x)
    count = int(lengths.sum())
    values = x.compressed() if isinstance(x, MaskedTensor) else x.flatten()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values.view(count, *x.shape[2:]), offsets)
