"""Convert from and to the masks of padded batches: attention_mask, key_padding_mask and lengths.

A batch has shape (B, T, …), and its mask marks each of the B · T positions as data or padding, which is not there. An
`attention_mask` marks data with 1, a `key_padding_mask` marks padding with True; each function's name states its kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import as_padded, extent_of, knows_padding, mask_of, takes
from masked_dispatch.tensor.checks import checked_dim, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(data=Tensor, attention_mask=Tensor)
def from_attention_mask(data: Tensor, attention_mask: Tensor) -> MaskedTensor:
    """A batch with an `attention_mask` of Hugging Face's tokenizers: positions are there where it is 1; differentiable.

    data            shape (B, T, …); the result shares it. Invalid elements of masked data stay invalid
    attention_mask  shape (B, T), bool or integers 0 and 1

    Raises TypeError for a mask of floating point, ValueError for another shape or other numbers.
    """
    check_shape(data, attention_mask, "attention_mask")
    if attention_mask.is_floating_point():
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}; it has to be bool or integers. If it is added to "
            "scores (0 for data, -inf for padding), pass attention_mask == 0; if it is 1 for data and 0 for "
            "padding, pass attention_mask != 0"
        )
    return with_positions(data, attention_mask)


@takes(x=Tensor)
def to_attention_mask(x: Tensor) -> Tensor:
    """Return an int64 mask of shape (B, T): 1 at valid positions of a batch (B, T, …) and 0 at padding.

    Raises ValueError for a partly valid position.
    """
    return positions_of(x, "an attention_mask").to(torch.int64)


@takes(data=Tensor, key_padding_mask=Tensor)
def from_key_padding_mask(data: Tensor, key_padding_mask: Tensor) -> MaskedTensor:
    """A batch with a mask of torch.nn.MultiheadAttention or nn.Transformer, padding where True; differentiable.

    data              shape (B, T, …); the result shares it. Invalid elements of masked data stay invalid
    key_padding_mask  bool, shape (B, T), True at padding

    Raises TypeError for a mask that is not bool, ValueError for another shape.
    """
    check_shape(data, key_padding_mask, "key_padding_mask")
    if key_padding_mask.dtype is not torch.bool:
        raise TypeError(
            f"key_padding_mask has dtype {key_padding_mask.dtype}; it has to be bool, True for padding. If it is "
            "added to scores (0 for data, -inf for padding), pass key_padding_mask != 0; if it is 1 for data, use "
            "from_attention_mask"
        )
    return with_positions(data, ~key_padding_mask)


@takes(x=Tensor)
def to_key_padding_mask(x: Tensor) -> Tensor:
    """Return a bool mask of shape (B, T), True at the padding of a batch (B, T, …).

    Raises ValueError for a partly valid position.
    """
    return ~positions_of(x, "a key_padding_mask")


@takes(x=Tensor)
def to_lengths(x: Tensor, dim: int = 1) -> Tensor:
    """Return int64 lengths of shape (B,): the number of valid positions along `dim`; see `from_lengths`.

    Raises ValueError if a position is partly valid, or if a valid one follows padding.
    """
    dim = checked_dim("to_lengths", x, dim) if x.ndim > 1 else dim
    if x.ndim < 2 or dim == 0:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has no lengths along dim={dim}: a batch has shape (B, ..., T, ...)"
        )
    valid = positions_of(x.movedim(dim, 1), "a length")
    lacking = 0
    if not values_unknown(valid) and knows_padding(x):  # (a graph cannot ask what a tensor knows)
        lacking = int((extent_of(x) & ~mask_of(x)).sum())
    if lacking:
        raise ValueError(
            f"{lacking} elements of a batch of shape {tuple(x.shape)} are missing where its samples have "
            "positions, and lengths cannot say which: fill them, masked_dispatch.missing.fillna(x, value); or let them "
            "be padding, masked_dispatch.padded(x)"
        )
    lengths = valid.sum(1)
    is_prefix = valid == (torch.arange(valid.shape[1], device=x.device) < lengths[:, None])
    if not values_unknown(is_prefix) and not is_prefix.all():
        row = int((~is_prefix.all(1)).nonzero()[0])
        raise ValueError(
            f"the valid positions of row {row} are not its first {int(lengths[row])}, and a length cannot describe "
            "others. Move them to the front, masked_dispatch.align(x), or use to_attention_mask(x)"
        )
    return lengths


def check_shape(data: Tensor, mask: Tensor, name: str) -> None:
    """Refuse a mask whose shape is not the batch shape (B, T) of `data`."""
    if data.ndim < 2 or mask.shape != data.shape[:2]:
        raise ValueError(
            f"{name} of shape {tuple(mask.shape)} does not fit data of shape {tuple(data.shape)}: it needs an entry "
            "for each position, (B, T) for data of (B, T, ...)"
        )


def with_positions(data: Tensor, there: Tensor, order: str = "?") -> MaskedTensor:
    """A batch (B, T, …) of which those positions (B, T) are there, in an order that `as_padded` names."""
    rest = data.ndim - 2
    return as_padded(data, there.view(*there.shape, *[1] * rest), "s" + order + "-" * rest)


def positions_of(x: Tensor, name: str) -> Tensor:
    """Return which positions of a batch are valid, shape (B, T); refuse partly valid positions."""
    if x.ndim < 2:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has no positions that {name} describes: a batch has shape (B, T, ...)"
        )
    mask = mask_of(x)
    if x.ndim == 2:
        return mask
    elements = mask.flatten(2)
    if not elements.shape[2]:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    whole = elements.all(2)
    if not values_unknown(mask):
        in_part = int((elements.any(2) != whole).sum())
        if in_part:
            raise ValueError(
                f"{in_part} of {whole.numel()} positions of a batch of shape {tuple(x.shape)} are partly valid, but "
                f"{name} only describes whole positions. Keep those that are valid as a whole, "
                f"x.mask_with(x.get_mask().flatten(2).all(2){'[..., None]' if x.ndim == 3 else '.view(...)'}), or "
                "choose values for the others"
            )
    return whole
