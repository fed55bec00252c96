"""Words of pandas for missing values, on tensors of any shape: an invalid element is a missing one.

Each takes masked tensors in any storage (and plain ones, of which nothing is missing), works along the dimension that
is named, and is differentiable; results are stored densely. They need no pandas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from masked_dispatch.api.construct import as_masked_tensor, from_nan
from masked_dispatch.api.known_words import WORDS
from masked_dispatch.interop.crossing import filled, mask_of
from masked_dispatch.tensor.checks import least_and_most, values_unknown
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from masked_dispatch.tensor.messages import no_such_name
from op_registry.records.dims import Number
from op_registry.records.dtypes import accumulation_dtype


class HasArray(Protocol):
    """An array of NumPy, or what NumPy can make one of."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


# Integers that number the groups along a dimension.
Groups = Tensor | Sequence[int] | HasArray

__all__ = [
    "bfill",
    "dropna",
    "ffill",
    "fillna",
    "group_count",
    "group_mean",
    "group_sum",
    "interpolate",
    "nan_to_invalid",
    "rolling",
]


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> NoReturn:
        no_such_name(__name__, name, WORDS, __all__)


def nan_to_invalid(x: Tensor) -> MaskedTensor:
    """`x`, of floating point or complex dtype, invalid where it is NaN too. (`from_nan` does it for plain tensors.)"""
    if not isinstance(x, MaskedTensor):
        return from_nan(x)
    if not _is_inexact(x):
        raise TypeError(f"nan_to_invalid needs floating point or complex values, which can be NaN; got {x.dtype}")
    return x.mask_with(~filled(x).detach().isnan())


def fillna(x: Tensor, value: Number | Tensor) -> Tensor:
    """`x` with `value` where it is invalid.

    value  a number, or a plain tensor that broadcasts to the shape: the result is plain, as that of
           ``x.to_tensor(value)``. A masked tensor: the result is masked, and invalid where both are; of the shape and
           dtype that torch.where gives
    """
    if not isinstance(x, MaskedTensor):
        return x
    if not isinstance(value, MaskedTensor):
        return x.to_tensor(value)
    mask = mask_of(x)
    return as_masked_tensor(torch.where(mask, filled(x), filled(value)), mask | mask_of(value))


def ffill(x: Tensor, dim: int, limit: int | None = None) -> MaskedTensor:
    """Each invalid element as the last valid one before it along `dim`; before the first it stays invalid.

    limit  how many invalid elements in a row are filled, at most
    """
    last = _last_valid(mask_of(x), dim)
    return _taken_from(x, last, last >= 0, dim, limit)


def bfill(x: Tensor, dim: int, limit: int | None = None) -> MaskedTensor:
    """Each invalid element as the next valid one after it along `dim`; after the last it stays invalid.

    limit  how many invalid elements in a row are filled, at most
    """
    following = _next_valid(mask_of(x), dim)
    return _taken_from(x, following, following < x.shape[dim], dim, limit)


def interpolate(x: Tensor, dim: int) -> MaskedTensor:
    """Each invalid element on the straight line between its valid neighbours along `dim`, which is evenly spaced.

    Before the first and after the last valid element it stays invalid: pandas' ``interpolate(limit_area="inside")``;
    follow it with `ffill` for pandas' default.

    Raises TypeError for integers and bool.
    """
    if not _is_inexact(x):
        raise TypeError(f"interpolate needs floating point or complex values; got {x.dtype}. Convert them: x.double()")
    mask, values = mask_of(x), filled(x)
    last, following = _last_valid(mask, dim), _next_valid(mask, dim)
    steps = x.shape[dim]
    # In the dtype of the values: integers divide to the default dtype, which may have fewer digits.
    precise = torch.promote_types(x.dtype, torch.float32)
    share = ((_positions(x, dim) - last).to(precise) / (following - last).clamp(min=1)).to(x.dtype)
    before = values.gather(dim, last.clamp(min=0))
    after = values.gather(dim, following.clamp(max=max(steps - 1, 0)))
    between = before * (1 - share) + after * share
    return as_masked_tensor(torch.where(mask, values, between), (last >= 0) & (following < steps))


def dropna(x: Tensor, dim: int = 0, how: Literal["any", "all"] = "any") -> MaskedTensor:
    """`x` without the slices along `dim` of which any, or all, elements are invalid; rows of a table for ``dim=0``."""
    if how not in ("any", "all"):
        raise ValueError(f"how={how!r} is neither 'any' nor 'all'")
    mask = mask_of(x).movedim(dim, 0).flatten(1) if x.ndim > 1 else mask_of(x)[:, None]
    keep = mask.all(1) if how == "any" else mask.any(1)
    return as_masked_tensor(x).index_select(dim, keep.nonzero()[:, 0])  # type: ignore[return-value]


def rolling(x: Tensor, window: int, dim: int, step: int = 1) -> Tensor:
    """Windows of `window` elements along `dim`, in a new last dimension: a view, `x.unfold(dim, window, step)`.

    ``masked_dispatch.mean(rolling(x, 3, 0), -1, min_count=2)`` is pandas' ``s.rolling(3, min_periods=2).mean()``, from
    the first whole window on.
    """
    return x.unfold(dim, window, step)


def group_count(x: Tensor, groups: Groups, num_groups: int | None = None, dim: int = 0) -> Tensor:
    """The number of valid elements of each group along `dim`: a plain int64 tensor. Arguments as of `group_mean`."""
    return _sum_by_group(mask_of(x).to(torch.int64), *_numbered(x, groups, num_groups, dim), dim)


def group_sum(x: Tensor, groups: Groups, num_groups: int | None = None, dim: int = 0) -> MaskedTensor:
    """The sum of the valid elements of each group along `dim`; invalid for a group that has none.

    Arguments as of `group_mean`, and `x` may be of integers or bool: the result has the dtype that torch.sum gives.
    """
    sums, counts = _sums_and_counts(x, groups, num_groups, dim)
    return as_masked_tensor(sums.to(x.dtype) if _is_inexact(x) else sums, counts > 0)


def group_mean(x: Tensor, groups: Groups, num_groups: int | None = None, dim: int = 0) -> MaskedTensor:
    """The mean of the valid elements of each group along `dim`; invalid for a group that has none.

    x           floating point or complex
    groups      integers, shape (x.shape[dim],), between 0 and num_groups - 1: a tensor, masked or plain, a list, or an
                array of NumPy such as ``pandas.factorize(labels)[0]``. What has an invalid group is in none
    num_groups  size of `dim` in the result; one more than the greatest group if not given

    Raises TypeError for other dtypes, ValueError for groups that do not fit.
    """
    if not _is_inexact(x):
        raise TypeError(f"group_mean needs floating point or complex values; got {x.dtype}. Convert them: x.double()")
    sums, counts = _sums_and_counts(x, groups, num_groups, dim)
    return as_masked_tensor((sums / counts.clamp(min=1)).to(x.dtype), counts > 0)


# ------------------------------------------------------------------------------------------------------------- helpers


def _is_inexact(x: Tensor) -> bool:
    """Whether the dtype has floating point numbers, complex ones included."""
    return x.is_floating_point() or x.is_complex()


def _numbered(x: Tensor, groups: Groups, num_groups: int | None, dim: int) -> tuple[Tensor, int]:
    """The group of each index along `dim`, as int64, `num_groups` where it is invalid; and the number of groups."""
    if not isinstance(groups, Tensor):
        groups = _as_numbers(groups, x.device)
    of_group, numbers = mask_of(groups), filled(groups)
    if numbers.dtype is torch.bool or numbers.is_floating_point() or numbers.is_complex():
        raise TypeError(f"groups are numbered by integers; got {numbers.dtype}. Number labels with labels.unique(…)")
    if numbers.shape != (x.shape[dim],):
        raise ValueError(
            f"groups of shape {tuple(numbers.shape)} do not fit dim={dim} of a tensor of shape {tuple(x.shape)}: one "
            "for each of its indices"
        )
    numbers = numbers.to(torch.int64)
    if num_groups is None:
        num_groups = int(numbers.max()) + 1 if numbers.numel() else 0
    if not values_unknown(numbers) and numbers.numel():
        least, most = least_and_most(numbers)
        if least < 0 or most >= num_groups:
            negative = (
                ". If -1 stands for a missing label, as in pandas, pass masked_tensor(groups, groups >= 0)"
                if least == -1
                else ""
            )
            raise ValueError(
                f"groups run from {least} to {most}, and there are num_groups={num_groups}, from 0 on{negative}"
            )
    return torch.where(of_group, numbers, num_groups), num_groups


def _as_numbers(groups: object, device: torch.device) -> Tensor:
    try:
        numbers = torch.as_tensor(groups, device=device)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise TypeError(
            f"groups are numbered by integers, and this {type(groups).__name__} holds no numbers that torch has. "
            "Number labels with numbers, labels = pandas.factorize(labels)"
        ) from error
    return numbers if numbers.numel() else numbers.to(torch.int64)  # an empty list has no dtype


def _sums_and_counts(x: Tensor, groups: Groups, num_groups: int | None, dim: int) -> tuple[Tensor, Tensor]:
    """The sums of the valid elements of each group, in the dtype that torch.sum adds up in, and their numbers."""
    numbers, num_groups = _numbered(x, groups, num_groups, dim)
    values = filled(x).to(accumulation_dtype(x.dtype) if _is_inexact(x) else torch.int64)
    counted = mask_of(x).to(torch.int64)
    return _sum_by_group(values, numbers, num_groups, dim), _sum_by_group(counted, numbers, num_groups, dim)


def _sum_by_group(values: Tensor, numbers: Tensor, num_groups: int, dim: int) -> Tensor:
    """Sums along `dim` over what has the same number; what has the number `num_groups` is left out."""
    sizes = list(values.shape)
    sizes[dim] = num_groups + 1
    return values.new_zeros(sizes).index_add(dim, numbers, values).narrow(dim, 0, num_groups)


def _positions(x: Tensor, dim: int) -> Tensor:
    """The indices along `dim`, in a shape that broadcasts to that of `x`."""
    dim = dim % x.ndim
    return torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.ndim - dim - 1))


def _last_valid(mask: Tensor, dim: int) -> Tensor:
    """For each element the index along `dim` of the last valid one up to it; -1 where there is none."""
    return torch.where(mask, _positions(mask, dim), -1).cummax(dim).values


def _next_valid(mask: Tensor, dim: int) -> Tensor:
    """For each element the index along `dim` of the first valid one from it on; the size of `dim` if there is none."""
    indices = torch.where(mask, _positions(mask, dim), mask.shape[dim])
    return indices.flip(dim).cummin(dim).values.flip(dim)


def _taken_from(x: Tensor, index: Tensor, exists: Tensor, dim: int, limit: int | None) -> MaskedTensor:
    """The elements at `index` along `dim`, invalid where none exists or it is more than `limit` away."""
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit={limit} fills nothing: it is at least 1, or None for no limit")
        exists = exists & ((_positions(x, dim) - index).abs() <= limit)
    inside = index.clamp(min=0, max=max(x.shape[dim] - 1, 0))
    return as_masked_tensor(filled(x).gather(dim, inside), exists)
