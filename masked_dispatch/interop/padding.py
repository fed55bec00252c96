"""Doors to the masks of padded batches: attention_mask, key_padding_mask and lengths.

A batch has shape (B, T, …), and such a mask says which of its B · T positions are data and which padding. In an
`attention_mask` 1 is data, in a `key_padding_mask` True is padding: which one it is the function's name says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import as_masked, mask_of, takes
from masked_dispatch.tensor.checks import check_mask, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor


@takes(data=Tensor, attention_mask=Tensor)
def from_attention_mask(data: Tensor, attention_mask: Tensor) -> MaskedTensor:
    """A batch, valid where its `attention_mask` is 1, as tokenizers of Hugging Face give it; differentiable.

    data            shape (B, T, …); shared. Masked data stays invalid where it was
    attention_mask  shape (B, T), bool or integers 0 and 1

    Raises TypeError for a mask of floating point, ValueError for another shape or other numbers.
    """
    check_shape(data, attention_mask, "attention_mask")
    if attention_mask.is_floating_point():
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}. Numbers that are added to scores, 0 for data and -inf "
            "for padding, say so with attention_mask == 0; zeros for padding and ones for data with attention_mask != 0"
        )
    return with_positions(data, attention_mask)


@takes(x=Tensor)
def to_attention_mask(x: Tensor) -> Tensor:
    """int64, shape (B, T), 1 where the positions of a batch (B, T, …) are valid and 0 where they are padding.

    Raises ValueError where a position is valid in part.
    """
    return positions_of(x, "an attention_mask").to(torch.int64)


@takes(data=Tensor, key_padding_mask=Tensor)
def from_key_padding_mask(data: Tensor, key_padding_mask: Tensor) -> MaskedTensor:
    """A batch, invalid where the mask that torch.nn.MultiheadAttention and nn.Transformer take is True; differentiable.

    data              shape (B, T, …); shared. Masked data stays invalid where it was
    key_padding_mask  bool, shape (B, T), True where there is padding

    Raises TypeError for a mask that is not bool, ValueError for another shape.
    """
    check_shape(data, key_padding_mask, "key_padding_mask")
    if key_padding_mask.dtype is not torch.bool:
        raise TypeError(
            f"key_padding_mask has dtype {key_padding_mask.dtype}, and only bool says that True is padding. Of numbers "
            "that are added to scores, 0 for data and -inf for padding, pass key_padding_mask != 0; a mask that is 1 "
            "for data goes to from_attention_mask"
        )
    return with_positions(data, ~key_padding_mask)


@takes(x=Tensor)
def to_key_padding_mask(x: Tensor) -> Tensor:
    """bool, shape (B, T), True where the positions of a batch (B, T, …) are padding.

    Raises ValueError where a position is valid in part.
    """
    return ~positions_of(x, "a key_padding_mask")


@takes(x=Tensor)
def to_lengths(x: Tensor, dim: int = 1) -> Tensor:
    """int64, shape (B,): how many positions along `dim` are valid, those before the padding; see `from_lengths`.

    Raises ValueError where a position is valid in part, or valid behind an invalid one.
    """
    dim = dim % x.ndim if x.ndim else dim
    if x.ndim < 2 or dim == 0:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no lengths along dim={dim}: a batch is (B, …, T, …)")
    valid = positions_of(x.movedim(dim, 1), "a length")
    lengths = valid.sum(1)
    is_prefix = valid == (torch.arange(valid.shape[1], device=x.device) < lengths[:, None])
    if not values_unknown(is_prefix) and not is_prefix.all():
        row = int((~is_prefix.all(1)).nonzero()[0])
        raise ValueError(
            f"the valid positions of row {row} are not its first {int(lengths[row])}, which is all that a length can "
            "say. Move them there (x.flip(1) of a batch that is padded on the left), or use to_attention_mask(x)"
        )
    return lengths


def check_shape(data: Tensor, mask: Tensor, name: str) -> None:
    """Refuse a mask that is not one of the positions of `data`."""
    if data.ndim < 2 or mask.shape != data.shape[:2]:
        raise ValueError(
            f"{name} of shape {tuple(mask.shape)} does not fit data of shape {tuple(data.shape)}: it has an entry for "
            "each position, (B, T) for data of (B, T, …)"
        )


def with_positions(data: Tensor, valid: Tensor) -> MaskedTensor:
    """A batch (B, T, …) under a mask (B, T) of positions."""
    return as_masked(data, check_mask(data, valid.view(*valid.shape, *[1] * (data.ndim - 2))))


def positions_of(x: Tensor, name: str) -> Tensor:
    """Which positions of a batch are valid, shape (B, T); each has to be so as a whole."""
    if x.ndim < 2:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has no positions that {name} describes: a batch is (B, T, …)"
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
                f"{in_part} of {whole.numel()} positions of a batch of shape {tuple(x.shape)} are valid in part, and "
                f"{name} describes whole positions. Keep those that are whole, "
                f"x.mask_with(x.get_mask().flatten(2).all(2){'[..., None]' if x.ndim == 3 else '.view(…)'}), or choose "
                "values for the others"
            )
    return whole
