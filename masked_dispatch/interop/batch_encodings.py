"""Convert from and to the batches of tokenizers and data collators in Hugging Face's transformers."""

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
