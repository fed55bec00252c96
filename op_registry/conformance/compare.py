"""How two results differ, to rounding or bit for bit: tensors, observed values, whole outcomes with gradients.

Every function returns a message that names the first difference, or None.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# The data of a tensor and its bool mask of full shape; the mask is None for a plain tensor.
Observed = tuple[Tensor, Tensor | None]
# Observed results and gradients of one run; results that are no tensors are as they are, a missing gradient is None.
Outcome = tuple[list[Any], list[Any]]

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


# ------------------------------------------------------------------------------- observed values, and outcomes of a run


@dataclass(frozen=True)
class Tolerance:
    """How exactly observed values have to agree.

    bits                 whether bit for bit; else to rounding
    relative             to the largest expected value, of floating-point results; None: the rounding of their dtype
    magnitude, coarsest  as in :func:`difference`
    values               whether values are compared at all, beside dtypes, shapes and masks
    absent_is_zero       whether a missing gradient is as good as one that is zero
    """

    bits: bool = False
    relative: float | None = None
    magnitude: float = 1.0
    coarsest: float = 0.0
    values: bool = True
    absent_is_zero: bool = False


BITS = Tolerance(bits=True)


def kind_of(value: Observed) -> str:
    return "a plain tensor" if value[1] is None else "a masked tensor"


def value_difference(got: object, want: object, tolerance: Tolerance) -> str | None:
    """How two values differ that are observed tensors or Python values; masks and values under them."""
    if not isinstance(got, tuple) or not isinstance(want, tuple):
        if tolerance.absent_is_zero:
            got, want = (value if is_nonzero(value) else None for value in (got, want))
        same = got is want or got == want or (got != got and want != want)
        return None if same else f"{short(got)} instead of {short(want)}"
    (data, mask), (wanted, wanted_mask) = got, want
    if mask is None or wanted_mask is None:
        wrong = None if mask is wanted_mask else f"{kind_of(got)} instead of {kind_of(want)}"
    else:
        wrong = mask_difference(mask, wanted_mask)
    if wrong:
        return wrong
    if data.dtype is not wanted.dtype or data.shape != wanted.shape:
        return f"{data.dtype} {tuple(data.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    if not tolerance.values:
        return None
    if tolerance.bits:
        return bit_difference(data, wanted, mask)
    relative = tolerance.relative if wanted.is_floating_point() else None
    return difference(data, wanted, mask, relative, tolerance.magnitude, tolerance.coarsest)


def first_difference(what: str, got: Sequence[Any], want: Sequence[Any], tolerance: Tolerance) -> str | None:
    """The first value in which two lists of observed values differ; `what` they are: "result", "gradient"."""
    if len(got) != len(want):
        return f"{len(got)} {what}s instead of {len(want)}"
    for position, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        wrong = value_difference(mine, theirs, tolerance)
        if wrong:
            return f"{what} {position}: {wrong}"
    return None


def outcome_difference(
    got: Outcome, want: Outcome, tolerance: Tolerance, of_gradients: Tolerance | None = None
) -> str | None:
    """How two outcomes differ; `of_gradients` is the tolerance of gradients, if it is another one."""
    return first_difference("result", got[0], want[0], tolerance) or first_difference(
        "gradient", got[1], want[1], of_gradients or tolerance
    )


def is_nonzero(gradient: Any) -> bool:
    """Whether a gradient is there, and not zero wherever it is valid."""
    if not isinstance(gradient, tuple):
        return gradient is not None
    return bool((gradient[0] if gradient[1] is None else gradient[0][gradient[1]]).any())


def greatest(values: Sequence[Any]) -> float:
    """The largest finite magnitude among the valid elements of observed values."""
    magnitudes = [0.0]
    for value in values:
        if isinstance(value, tuple) and (value[0].is_floating_point() or value[0].is_complex()):
            valid = value[0] if value[1] is None else value[0][value[1]]
            finite = valid.abs()[valid.isfinite()]
            magnitudes += [float(finite.max())] if finite.numel() else []
    return max(magnitudes)


# ------------------------------------------------------------------------------------------------------ a repeated call

REPETITIONS = 64
SIZES = (8, 16, 48, 64, 100, 128, 200, 256, 512, 1000, 3000)  # of small tensors in bytes


def repeats_itself(run: Callable[[], T], first: T, same: Callable[[T, T], bool]) -> bool:
    """Whether every further `run`, with its tensors elsewhere in memory, gives the first run's result.

    Some LAPACK routines sum in an order that depends on the address of their operands, and one starts from memory that
    torch has not initialised (the pivots of lstsq's gelsy): one call in five then differs in its last bits.
    """
    sizes = random.Random(0)
    # These live tensors occupy the memory that the next run would otherwise reuse.
    kept: list[object] = [first]
    for _ in range(REPETITIONS):
        kept += [torch.empty(sizes.choice(SIZES), dtype=torch.uint8) for _ in range(sizes.randrange(30))]
        again = run()
        kept.append(again)
        if not same(again, first):
            return False
    return True
