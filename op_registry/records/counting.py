"""Counting valid elements, eight of them at a time.

torch sums int8 one element after another. We read the mask's bytes as int64, so that one addition sums eight lanes;
each lane stays exact for up to 255 summands.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from op_registry.records.tracing import being_traced

_LANES = 8
_MOST = 255
# Below this many elements torch's own sum costs less than these calls.
_WORTH_IT = 1 << 16


def count_ones(validity: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The number of ones of an int8 mask over `dims`, exact: int32 or int64."""
    if not being_traced(validity) and validity.device.type == "cpu" and validity.numel() >= _WORTH_IT:
        lanes = _by_lanes(validity, dims)
        if lanes is not None:
            kept = [1 if d in dims else n for d, n in enumerate(validity.shape) if keepdim or d not in dims]
            return lanes.reshape(kept)
    return validity.sum(dims, keepdim=keepdim, dtype=torch.int32)


def _by_lanes(validity: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """The counts, flat; None if the mask's memory or the dimensions do not allow words of eight bytes."""
    if not validity.is_contiguous() or validity.storage_offset() % _LANES:
        return None
    first = min(dims)
    count = math.prod(validity.shape[d] for d in dims)
    if set(dims) == set(range(first, validity.ndim)):
        if count % _LANES:
            return None
        words = validity.view(-1, count).view(torch.int64)
        return _sum_of_words(words, 1).view(torch.uint8).view(len(words), -1).sum(-1, dtype=torch.int32)
    if set(dims) == set(range(first, first + len(dims))):
        inner = math.prod(validity.shape[first + len(dims) :])
        if inner % _LANES:
            return None
        words = validity.view(-1, count, inner).view(torch.int64)
        return _sum_of_words(words, 1).view(torch.uint8).view(len(words), -1, inner).sum(1, dtype=torch.int32)
    return None


def _sum_of_words(words: Tensor, dim: int) -> Tensor:
    """Sums of at most 255 words each; a dimension that lists these sums replaces `dim`."""
    whole = words.shape[dim] // _MOST * _MOST
    parts = words.narrow(dim, 0, whole).unflatten(dim, (-1, _MOST)).sum(dim + 1)
    rest = words.narrow(dim, whole, words.shape[dim] - whole).sum(dim, keepdim=True)
    return torch.cat([parts, rest], dim)
