"""Doors to the batches that tokenizers and data collators of Hugging Face's transformers give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import takes
from masked_dispatch.interop.padding import from_attention_mask, positions_of
from masked_dispatch.tensor.masked_tensor import MaskedTensor

MASK = "attention_mask"


@takes(
    batch=Mapping,
    instead=f"pass what a tokenizer returns, or {{'input_ids': ids, {MASK!r}: mask}}; for one tensor use "
    "from_attention_mask(data, mask)",
)
def from_batch_encoding(
    batch: Mapping[str, Any], keys: Iterable[str] | None = None, *, keep_attention_mask: bool = True
) -> dict[str, Any]:
    """A batch with an `attention_mask` as a dict of masked tensors, for ``model(**batch)``.

    batch  what ``tokenizer(texts, padding=True, return_tensors="pt")`` or DataCollatorWithPadding gives, or any mapping
    keys   of the tensors to mask; every tensor of attention_mask's shape (B, T) if not given. What is not masked is
           passed on as it is
    keep_attention_mask
           whether the plain attention_mask stays beside them. Models read it for more than attention: OPT for
           positions, mixtures of experts for the loss that balances them, ModernBERT for the mean over tokens. Without
           it, a model of transformers with ``attn_implementation="sdpa"`` leaves out what is invalid in attention all
           the same, and packed ids are faster

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
    """The inverse: masked tensors filled with the padding that each name has, and their mask as `attention_mask`.

    batch    a mapping with masked tensors (B, T, …), all of the same positions
    padding  what stands in the padding of each: ``{"input_ids": tokenizer.pad_token_id, "labels": -100}``

    Raises KeyError for a name without padding, ValueError for positions that differ or are valid in part.
    """
    masked = {key: value for key, value in batch.items() if isinstance(value, MaskedTensor)}
    if not masked:
        raise ValueError(
            f"to_batch_encoding takes a batch that has a masked tensor, not only plain {', '.join(map(repr, batch))}"
        )
    unknown = [key for key in masked if key not in padding]
    if unknown:
        raise KeyError(f"no padding is given for {unknown}: to_batch_encoding(batch, {{{unknown[0]!r}: number, …}})")
    positions = {key: positions_of(value, f"the {MASK} of {key!r}") for key, value in masked.items()}
    (first, valid), *others = positions.items()
    for key, other in others:
        if other.shape != valid.shape or not torch.equal(other, valid):
            raise ValueError(
                f"{first!r} and {key!r} are valid at different positions, and a batch has one {MASK}: give both the "
                "mask that they share, x.mask_like(y)"
            )
    plain = {key: value.to_tensor(padding[key]) if key in masked else value for key, value in batch.items()}
    return {**plain, MASK: valid.to(torch.int64)}
