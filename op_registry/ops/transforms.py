"""Fourier transforms: discrete ones, from which torch composes all of torch.fft, and short-time transforms.

Law: all or nothing for each slice. A slice is a line, a block over several dimensions, or a frame of a short-time
transform. A signal with missing samples has no spectrum without a model of the signal. With ``n=`` and ``s=`` torch
first drops elements, which are then not read, or pads with zeros, which are valid.

Law of short-time transforms: a frame of the transform depends on all of its `n_fft` samples, even where the window is
zero. A sample of the inverse depends on every frame that covers it, and on the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from op_registry.authoring import (
    WHOLE_SLICES,
    Along,
    Bound,
    Dense,
    Equation,
    Slices,
    as_int8,
    intersect,
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


# ------------------------------------------------------------------------------------- the inverse short-time transform

# The forward one decomposes into views (the frames) and a transform of each frame.


@masked_rule(aten.istft.default, category=WHOLE_SLICES, takes_call=True, dims=Equation("*fn,w->*S"))
def istft(c: Bound) -> Dense:
    """If `length` asks for samples beyond the last frame, torch writes zeros there, which are valid."""
    x, n_fft, window = c.self, c.n_fft, c.window
    # A real signal has the first half of the spectrum; the rest of a two-sided one is not read.
    read = None if c.return_complex or x.ndim < 2 else first_entries(x, x.ndim - 2, n_fft // 2 + 1)
    frames = whole_validity(x, (-2,), read)
    whole_window = None if window is None else whole_validity(window, (-1,))
    entries = replaced(x, frames, 0, partly_read=read is not None)
    filled_window = None if window is None else replaced(window, whole_window, 1)
    signal = c.with_(self=entries, window=filled_window).applied(c.op)
    covered = None
    if frames is not None:
        each = frames[..., 0, :].expand(*x.shape[:-2], x.shape[-1])
        hop, start = c.hop_length or n_fft // 4, n_fft // 2 if c.center else 0
        covered = covered_by_whole_frames(each, n_fft, hop, start, signal.shape[-1])
    if whole_window is not None:
        whole_window = whole_window.reshape((1,) * signal.ndim)
    return Dense(signal, intersect(covered, whole_window))


def covered_by_whole_frames(frames: Tensor, n_fft: int, hop: int, start: int, samples: int) -> Tensor:
    """Whether every frame that covers a sample is whole: (…, frames) → (…, samples).

    Frame t covers the samples from t·hop to t·hop + n_fft - 1; the first result is sample `start`.
    """
    missing = (frames == 0).to(torch.int32).cumsum(-1, dtype=torch.int32)
    missing_before = torch.nn.functional.pad(missing, (1, 0))
    position = torch.arange(start, start + samples, device=frames.device)
    last = frames.shape[-1]
    first_frame = ((position - n_fft).div(hop, rounding_mode="floor") + 1).clamp(0, last)
    after_last_frame = (position.div(hop, rounding_mode="floor") + 1).clamp(0, last)
    return as_int8(missing_before[..., after_last_frame] == missing_before[..., first_frame])
