"""Comparison of valid values, to rounding or bit for bit, with a message that names the first difference."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the largest expected value: allows for a few roundings and another order of summation.
ROUNDING = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.complex64: 2e-5,
    torch.complex128: 1e-9,
    torch.complex32: 5e-3,
}


def short(value: object) -> str:
    """A value in at most 160 characters."""
    text = repr(value).replace("\n", " ")
    return text if len(text) < 160 else text[:157] + "..."


def _real(data: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, which are compared separately; other tensors unchanged."""
    return torch.view_as_real(data.resolve_conj()) if data.dtype.is_complex else data


def _nan(data: Tensor) -> Tensor:
    """Where a tensor of any dtype is NaN, the only value unequal to itself. (`isnan` doesn't take every dtype.)"""
    return data != data


def _bits(data: Tensor) -> Tensor:
    """A real tensor as integers of the same size."""
    if not data.dtype.is_floating_point:
        return data
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return data.contiguous().view(sizes[data.element_size()])


def _other_bits(got: Tensor, want: Tensor) -> Tensor:
    """Where two tensors of one dtype and shape differ in a bit; all NaNs count as equal.

    The bits of a NaN depend on the processor's vector width and on the order of the operands.
    """
    got, want = _real(got), _real(want)
    return (_bits(got) != _bits(want)) & ~(_nan(got) & _nan(want))


def bit_difference(got: Tensor, want: Tensor, mask: Tensor | None = None) -> str | None:
    """How the two differ bit for bit (where `mask`), or None."""
    got, want = got.detach().resolve_neg(), want.detach().resolve_neg()
    if got.dtype is not want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if mask is not None:
        got, want = got[mask], want[mask]
    if not got.numel():
        return None
    where = _other_bits(got, want).reshape(got.numel(), -1).any(1).nonzero()[:, 0]
    if not where.numel():
        return None
    first = int(where[0])
    return (
        f"{len(where)} of {got.numel()} values differ, the first {got.reshape(-1)[first].item()} "
        f"instead of {want.reshape(-1)[first].item()}"
    )


def difference(
    got: Tensor,
    want: Tensor,
    mask: Tensor | None = None,
    tolerance: float | None = None,
    magnitude: float = 1.0,
    coarsest: float = 0.0,
) -> str | None:
    """How `got` differs from `want` by more than rounding (where `mask`), or None.

    magnitude  the magnitude of intermediate values, which errors scale with
    coarsest   the rounding of the coarsest input, below which results cannot agree
    """
    got, want = got.detach(), want.detach()
    if got.dtype is not want.dtype:
        return f"dtype {got.dtype} instead of {want.dtype}"
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if mask is not None:
        got, want = got[mask], want[mask]
    if not want.numel():
        return None
    rounding = tolerance if tolerance is not None else ROUNDING.get(want.dtype)
    if rounding is None:
        # float8 too: a tolerance wide enough for two or three bits of mantissa would accept almost anything.
        wrong = (got != want) & ~(_nan(got) & _nan(want))
    else:
        wrong = beyond_rounding(got, want, max(rounding, coarsest), magnitude)
    if not bool(wrong.any()):
        return None
    first = int(wrong.reshape(-1).nonzero()[0])
    return (
        f"{int(wrong.sum())} of {want.numel()} values differ, the first {got.reshape(-1)[first].item()} "
        f"instead of {want.reshape(-1)[first].item()}"
    )


def beyond_rounding(got: Tensor, want: Tensor, rounding: float, magnitude: float) -> Tensor:
    """Where two tensors of numbers differ by more than this share of the largest expected value, or of `magnitude`."""
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    a, b = got.to(wide), want.to(wide)
    finite = b.abs()[b.isfinite()]
    scale = max(magnitude, float(finite.max())) if finite.numel() else magnitude
    return ~(((a - b).abs() <= rounding * scale) | (a == b) | (a.isnan() & b.isnan()))


def mask_difference(got: Tensor, want: Tensor) -> str | None:
    """How two masks differ, or None."""
    if got.dtype is not torch.bool:
        return f"the mask is {got.dtype}"
    if got.shape != want.shape:
        return f"mask of shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if torch.equal(got, want):
        return None
    return f"mask {short(got.to(torch.int8).tolist())} instead of {short(want.to(torch.int8).tolist())}"
