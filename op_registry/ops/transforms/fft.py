"""Discrete Fourier transforms, from which torch composes all of torch.fft.

Law: all or nothing for each block that the transformed dimensions span. With ``n=`` and ``s=`` torch first drops
elements, which are then not read, or pads with zeros, which are valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.authoring import (
    WHOLE_SLICES,
    Along,
    Dense,
    Slices,
    masked_rule,
    replaced,
    whole_slices,
    whole_validity,
    wrap_dim,
)

aten = torch.ops.aten

# A real signal may have the first half of its spectrum alone.
_fft_r2c = whole_slices(aten._fft_r2c, dims=Along("window"), replacement=0)
_fft_c2c = whole_slices(aten._fft_c2c, dims=Slices("each"), replacement=0)


@masked_rule(aten._fft_c2r, category=WHOLE_SLICES, dims=Along("window"))
def _fft_c2r(self: Dense, dim: Sequence[int], normalization: int, last_dim_size: int) -> Dense:
    """In the last transformed dimension, it only reads the entries that a real signal of `last_dim_size` has."""
    read = first_entries(self, wrap_dim(dim[-1], self.ndim), last_dim_size // 2 + 1) if len(dim) else None
    whole = whole_validity(self, dim, read)
    return Dense(
        aten._fft_c2r(replaced(self, whole, 0, partly_read=read is not None), dim, normalization, last_dim_size), whole
    )


def first_entries(x: Dense, dim: int, count: int) -> Tensor | None:
    """True at the first `count` indices of a dimension, broadcasting to `x`; None if these are all."""
    if x.shape[dim] <= count:
        return None
    return (torch.arange(x.shape[dim], device=x.device) < count).reshape([-1] + [1] * (x.ndim - 1 - dim))
