"""Convert from and to batches of sequences: their masks and lengths, PackedSequence, nested tensors, tokenizers.

A batch has shape (B, T, …), and its mask marks each of the B · T positions as data or padding, which is not there. An
`attention_mask` marks data with 1, a `key_padding_mask` marks padding with True; each function's name states its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from masked_dispatch.interop.crossing import as_padded, extent_of, filled, knows_padding, mask_of, takes
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


# --------------------------------------------------------- torch's PackedSequence, which stores sequences by time steps


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


# ------------------------------------------------------------------- torch.nested, which stores tensors without padding


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


# ---------------------------------------------- batches of tokenizers and data collators in Hugging Face's transformers

MASK = "attention_mask"


@takes(
    batch=Mapping,
    instead=f"pass what a tokenizer returns, or {{'input_ids': ids, {MASK!r}: mask}}; for one tensor use "
    "from_attention_mask(data, mask)",
)
def from_batch_encoding(
    batch: Mapping[str, Any], keys: Iterable[str] | None = None, *, keep_attention_mask: bool = True
) -> dict[str, Any]:
    """Convert a batch with an `attention_mask` to a dict of masked tensors, for ``model(**batch)``.

    batch  a mapping, such as from ``tokenizer(texts, padding=True, return_tensors="pt")`` or DataCollatorWithPadding
    keys   the tensors to mask, by default all of attention_mask's shape (B, T). The function passes other values on
           unchanged
    keep_attention_mask
           whether the result keeps the plain attention_mask. Models read it for more than attention: OPT for
           positions, mixtures of experts for the load-balancing loss, ModernBERT for the mean over tokens. Without
           it, a model of transformers with ``attn_implementation="sdpa"`` still excludes invalid positions from
           attention, and packed ids are faster

    Raises KeyError for a batch without attention_mask or one of the keys; as `from_attention_mask` does.
    """
    if MASK not in batch:
        raise KeyError(
            f"the batch has no {MASK!r}, only {', '.join(map(repr, batch))}: pass return_attention_mask=True to the "
            "tokenizer, or mask its tensors with from_attention_mask(data, mask)"
        )
    mask = batch[MASK]
    if not isinstance(mask, Tensor):
        raise TypeError(f"{MASK!r} is a {type(mask).__name__}, not a tensor: pass return_tensors='pt' to the tokenizer")
    if keys is None:
        keys = [key for key, value in batch.items() if isinstance(value, Tensor) and value.shape == mask.shape]
    chosen = set(keys) - {MASK}
    if not chosen <= set(batch):
        raise KeyError(f"the batch has no {sorted(chosen - set(batch))}, only {', '.join(map(repr, batch))}")
    return {
        key: from_attention_mask(value, mask) if key in chosen else value
        for key, value in batch.items()
        if key != MASK or keep_attention_mask
    }


@takes(batch=Mapping, padding=Mapping, instead="pass {'input_ids': ids}")
def to_batch_encoding(batch: Mapping[str, Any], padding: Mapping[str, int | float]) -> dict[str, Any]:
    """Invert `from_batch_encoding`: fill masked tensors with padding values, and return their mask as `attention_mask`.

    batch    a mapping with masked tensors (B, T, …) that have the same valid positions
    padding  the padding value of each name: ``{"input_ids": tokenizer.pad_token_id, "labels": -100}``

    Raises KeyError for a name without padding, ValueError for different or partly valid positions.
    """
    masked = {key: value for key, value in batch.items() if isinstance(value, MaskedTensor)}
    if not masked:
        raise ValueError(
            f"to_batch_encoding takes a batch that has a masked tensor, not only plain {', '.join(map(repr, batch))}"
        )
    unknown = [key for key in masked if key not in padding]
    if unknown:
        raise KeyError(f"no padding is given for {unknown}: to_batch_encoding(batch, {{{unknown[0]!r}: number, ...}})")
    positions = {key: positions_of(value, f"the {MASK} of {key!r}") for key, value in masked.items()}
    (first, valid), *others = positions.items()
    for key, other in others:
        if other.shape != valid.shape or not torch.equal(other, valid):
            raise ValueError(
                f"{first!r} and {key!r} are valid at different positions, but a batch has one {MASK}: give both the "
                "same mask, x.mask_like(y)"
            )
    plain = {key: value.to_tensor(padding[key]) if key in masked else value for key, value in batch.items()}
    return {**plain, MASK: valid.to(torch.int64)}


# ------------------------------------------------------------------------------------------------------------ positions


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
