"""Fill, move and drop what is missing along a dimension; and what all functions for missing values share."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor

from masked_dispatch.api.along_dim import last_true, next_true, positions
from masked_dispatch.api.construct import as_masked_tensor, from_nan
from masked_dispatch.interop.crossing import extent_of, filled, mask_of, numbers_positions, placed_like, takes
from masked_dispatch.tensor.checks import checked_dim
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError
from op_registry.records.arguments import Number, accumulation_dtype

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
_INSTEAD = "pass masked_dispatch.interop.from_pandas(x) of a frame, masked_tensor(x, mask) of an array"
takes_tensor = takes(x=Tensor, instead=_INSTEAD, words=KEYWORDS)
takes_tensor_but_method = takes(x=Tensor, instead=_INSTEAD, words=KEYWORDS, further="method")
takes_keywords = takes(words=KEYWORDS)  # decorates a method


@takes_tensor
def nan_to_invalid(x: Tensor) -> MaskedTensor:
    """`x`, of floating point or complex dtype, invalid where it is NaN too. (`from_nan` does it for plain tensors.)"""
    if not isinstance(x, MaskedTensor):
        return from_nan(x)
    if not is_inexact(x):
        raise TypeError(f"nan_to_invalid needs floating point or complex values, which can be NaN; got {x.dtype}")
    return x.mask_with(~filled(x).detach().isnan())


@takes_tensor
def fillna(x: Tensor, value: Number | Tensor) -> Tensor:
    """`x` with `value` where it is invalid.

    value  a number, or a plain tensor that broadcasts to the shape: the result is plain, as that of
           ``x.to_tensor(value)``. A masked tensor: the result is masked, and invalid where both are; of the shape and
           dtype that torch.where gives

    Padding is not filled: of a batch that knows which positions are there, the result does too, and is masked.
    """
    if not isinstance(x, MaskedTensor):
        return x
    if not isinstance(value, MaskedTensor):
        return placed_like(x.to_tensor(value), x)  # type: ignore[no-any-return]
    return torch.where(mask_of(x), x.to_dense(), value)


@takes_tensor
def ffill(x: Tensor, dim: int, limit: int | None = None) -> MaskedTensor:
    """Replace each invalid element by the last valid one before it along `dim`; before the first it stays invalid.

    limit  how many invalid elements in a row are filled, at most
    """
    given = InOrder(x, dim)
    last = last_true(given.mask, given.dim)
    return _taken_from(given, last, last >= 0, limit)


@takes_tensor
def bfill(x: Tensor, dim: int, limit: int | None = None) -> MaskedTensor:
    """Replace each invalid element by the next valid one along `dim`; after the last it stays invalid.

    limit  how many invalid elements in a row are filled, at most
    """
    given = InOrder(x, dim)
    following = next_true(given.mask, given.dim)
    return _taken_from(given, following, following < x.shape[given.dim], limit)


def _taken_from(x: InOrder, index: Tensor, exists: Tensor, limit: int | None) -> MaskedTensor:
    """The elements at `index`, invalid where none exists or it is more than `limit` away."""
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit={limit} fills nothing: pass at least 1, or None for no limit")
        exists = exists & ((positions(x.mask, x.dim) - index).abs() <= limit)
    inside = index.clamp(min=0, max=max(x.mask.shape[x.dim] - 1, 0))
    return x.result(x.values.gather(x.dim, inside), exists)


@takes_tensor_but_method
def interpolate(x: Tensor, dim: int) -> MaskedTensor:
    """Interpolate each invalid element linearly between its valid neighbours along `dim`, which is evenly spaced.

    Before the first and after the last valid element it stays invalid: pandas' ``interpolate(limit_area="inside")``;
    follow it with `ffill` for pandas' default.

    Raises TypeError for integers and bool.
    """
    if not is_inexact(x):
        raise TypeError(f"interpolate needs floating point or complex values; got {x.dtype}. Convert them: x.double()")
    given = InOrder(x, dim)
    mask, values, dim = given.mask, given.values, given.dim
    last, following = last_true(mask, dim), next_true(mask, dim)
    steps = x.shape[dim]
    # In the dtype of the values: integers divide to the default dtype, which may have fewer digits.
    precise = torch.promote_types(x.dtype, torch.float32)
    share = ((positions(x, dim) - last).to(precise) / (following - last).clamp(min=1)).to(x.dtype)
    before = values.gather(dim, last.clamp(min=0))
    after = values.gather(dim, following.clamp(max=max(steps - 1, 0)))
    between = before * (1 - share) + after * share
    return given.result(torch.where(mask, values, between), (last >= 0) & (following < steps))


@takes_tensor
def dropna(x: Tensor, dim: int = 0, how: Literal["any", "all"] = "any") -> MaskedTensor:
    """`x` without the slices along `dim` that have an invalid element, or no valid one: rows, for ``dim=0``.

    Padding is no invalid element. Raises MaskedSemanticsError along a dimension that numbers positions of samples, as
    each sample would drop others.
    """
    if how not in ("any", "all"):
        raise ValueError(f"how={how!r} is neither 'any' nor 'all'")
    dim = checked_dim("dropna", x, dim)
    if numbers_positions(x, dim):
        raise MaskedSemanticsError(
            f"dropna: dimension {dim} of a tensor of shape {tuple(x.shape)} numbers the positions of its samples, and "
            "each would drop others. Let what is missing be padding, masked_dispatch.padded(x); or keep what is "
            "complete in all samples, dropna(x.without_extent(), dim)."
        )
    lacks = ~mask_of(x) if how == "all" else ~mask_of(x) & extent_of(x)
    lacks = lacks.movedim(dim, 0).flatten(1) if x.ndim > 1 else lacks[:, None]
    keep = ~(lacks.any(1) if how == "any" else lacks.all(1))
    return as_masked_tensor(x).index_select(dim, keep.nonzero()[:, 0])  # type: ignore[return-value]


@takes_tensor
def shift(x: Tensor, periods: int, dim: int) -> MaskedTensor:
    """Each element `periods` places further along `dim`; the vacated places are invalid.

    periods  an integer; negative: towards the beginning

    The dtype and the shape stay. (`x.roll` would move the last elements to the beginning.)
    """
    given = InOrder(x, dim)
    size = x.shape[given.dim]
    source = positions(x, given.dim).expand(x.shape) - operator.index(periods)
    inside = (source >= 0) & (source < size)
    index = source.clamp(min=0, max=max(size - 1, 0))
    return given.result(given.values.gather(given.dim, index), inside & given.mask.gather(given.dim, index))


# -------------------------------------------------------------------------- what all functions for missing values share


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


class Statistics:
    """Statistics of the valid elements of each group or window: those that need their numbers, sums and variances.

    filled  the elements, 0 or False where invalid
    least   the number of valid elements that a result needs; 0: the sum of none is 0
    """

    _filled: Tensor
    _least: int

    def _numbers_of_valid(self) -> Tensor:
        raise NotImplementedError

    def _sums(self, dtype: torch.dtype) -> Tensor:
        """The sums, added up in a dtype."""
        raise NotImplementedError

    def _variances(self, correction: float) -> Tensor:
        """The variances, in the dtype that sums are added up in, real for complex values."""
        raise NotImplementedError

    def _result(self, values: Tensor, least: int) -> MaskedTensor:
        """What was computed for each group or window, valid where it has so many valid elements."""
        raise NotImplementedError

    def sum(self) -> MaskedTensor:
        """The sum, in the dtype that torch.sum gives."""
        adding, result = summed_dtype(self._filled)
        return self._result(self._sums(adding).to(result), self._least)

    def mean(self) -> MaskedTensor:
        """The mean."""
        check_inexact(self._filled, "mean")
        adding, result = summed_dtype(self._filled)
        return self._of_some((self._sums(adding) / self._numbers_of_valid().clamp(min=1)).to(result))

    @takes_keywords
    def var(self, correction: float = 1) -> MaskedTensor:
        """The variance; of one element NaN, as torch.var gives. Real for complex values."""
        check_inexact(self._filled, "var")
        return self._of_some(self._variances(correction).to(self._filled.real.dtype))

    @takes_keywords
    def std(self, correction: float = 1) -> MaskedTensor:
        """The standard deviation; of one element NaN, as torch.std gives. Real for complex values."""
        check_inexact(self._filled, "std")
        return self._of_some(root(self._variances(correction)).to(self._filled.real.dtype))

    def _of_some(self, values: Tensor) -> MaskedTensor:
        return self._result(values, max(self._least, 1))
