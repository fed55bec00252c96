"""What the functions for missing values share."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.interop.crossing import takes
from op_registry.records.dtypes import accumulation_dtype

# Decorates a function of `x`, so that a frame or an array is refused with what to pass.
takes_tensor = takes(
    x=Tensor, instead="pass masked_dispatch.interop.from_pandas(x) of a frame, masked_tensor(x, mask) of an array"
)


def is_inexact(x: Tensor) -> bool:
    """Whether the dtype has floating point numbers, complex ones included."""
    return x.is_floating_point() or x.is_complex()


def check_inexact(x: Tensor, word: str) -> None:
    """Refuse integers and bool, of which torch has no mean either."""
    if not is_inexact(x):
        raise TypeError(f"{word} needs floating point or complex values; got {x.dtype}. Convert them: x.double()")


def summed_dtype(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype that torch.sum adds `x` up in, and that of its result."""
    return (accumulation_dtype(x.dtype), x.dtype) if is_inexact(x) else (torch.int64, torch.int64)


def square_of_distance(x: Tensor) -> Tensor:
    """The squared absolute value, real for complex numbers too."""
    return (x * x.conj()).real if x.is_complex() else x.square()


def root(variance: Tensor) -> Tensor:
    """The square root, whose derivative at 0 is 0, as that of torch.std; NaN stays."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), variance)
