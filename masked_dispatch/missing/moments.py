"""What the functions for missing values share."""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.api.construct import as_masked_tensor
from masked_dispatch.interop.crossing import filled, mask_of, placed_like, takes
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.dtypes import accumulation_dtype

# Keywords of pandas, and what is written here.
KEYWORDS = {
    "axis": "here it is dim=",
    "by": "here it is labels=, with one label for each index along dim",
    "ddof": "here it is correction=",
    "fill_value": "fill the result, masked_dispatch.missing.fillna(result, value)",
    "limit_area": "it fills between valid elements; masked_dispatch.missing.ffill and bfill fill after and before them",
    "limit_direction": "it fills between valid elements; masked_dispatch.missing.ffill and bfill fill after and before",
    "method": "masked_dispatch.missing.ffill and bfill repeat neighbours, and interpolate is linear, of evenly spaced "
    "elements. pandas has others: from_pandas(to_pandas(x, index=times).interpolate(method=...)), both of "
    "masked_dispatch.interop",
    "min_periods": "here it is min_count=",
    "subset": "keep the rows by their mask, x[x[:, columns].get_mask().all(1)]",
    "thresh": "keep the rows by their count, x[x.count(1) >= n]",
}

# Decorates a function of `x`, so that a frame or an array is refused with what to pass.
takes_tensor = takes(
    x=Tensor,
    instead="pass masked_dispatch.interop.from_pandas(x) of a frame, masked_tensor(x, mask) of an array",
    words=KEYWORDS,
)
takes_keywords = takes(words=KEYWORDS)  # decorates a method


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


class InOrder:
    """A tensor along a dimension, in plain tensors in which each sample's own positions follow one another.

    values  its values, 0 or False where invalid
    mask    True where valid
    dim     the dimension, not negative
    """

    def __init__(self, x: Tensor, dim: int) -> None:
        x.size(dim)  # raises torch's error
        self._x, self.dim = x, dim % x.ndim
        masked = isinstance(x, MaskedTensor)
        self._moves: list[Tensor] = torch.ops.masked_dispatch.own_order(x, self.dim) if masked else []
        self.values, self.mask = self._moved(filled(x), 0), self._moved(mask_of(x), 0)

    def result(self, values: Tensor, valid: Tensor) -> MaskedTensor:
        """What was computed for each element, where its element was; it is there where `x` is."""
        return placed_like(as_masked_tensor(self._moved(values, 1), self._moved(valid, 1)), self._x)  # type: ignore[no-any-return]

    def counts(self, numbers: Tensor) -> Tensor:
        """The same of numbers that are valid: a plain tensor, unless `x` knows its padding."""
        return placed_like(self._moved(numbers, 1), self._x)  # type: ignore[no-any-return]

    def _moved(self, elements: Tensor, which: int) -> Tensor:
        return elements.gather(self.dim, self._moves[which]) if self._moves else elements
