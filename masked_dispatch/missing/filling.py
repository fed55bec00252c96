"""Fill, move and drop what is missing along a dimension."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor

from masked_dispatch.api.along_dim import last_true, next_true, positions
from masked_dispatch.api.construct import as_masked_tensor, from_nan
from masked_dispatch.interop.crossing import filled, mask_of
from masked_dispatch.missing.moments import is_inexact, takes_tensor
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry.records.dims import Number


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
    """
    if not isinstance(x, MaskedTensor):
        return x
    if not isinstance(value, MaskedTensor):
        return x.to_tensor(value)
    mask = mask_of(x)
    return as_masked_tensor(torch.where(mask, filled(x), filled(value)), mask | mask_of(value))


@takes_tensor
def ffill(x: Tensor, dim: int, limit: int | None = None) -> MaskedTensor:
    """Replace each invalid element by the last valid one before it along `dim`; before the first it stays invalid.

    limit  how many invalid elements in a row are filled, at most
    """
    last = last_true(mask_of(x), dim)
    return _taken_from(x, last, last >= 0, dim, limit)


@takes_tensor
def bfill(x: Tensor, dim: int, limit: int | None = None) -> MaskedTensor:
    """Replace each invalid element by the next valid one along `dim`; after the last it stays invalid.

    limit  how many invalid elements in a row are filled, at most
    """
    following = next_true(mask_of(x), dim)
    return _taken_from(x, following, following < x.shape[dim], dim, limit)


@takes_tensor
def interpolate(x: Tensor, dim: int) -> MaskedTensor:
    """Interpolate each invalid element linearly between its valid neighbours along `dim`, which is evenly spaced.

    Before the first and after the last valid element it stays invalid: pandas' ``interpolate(limit_area="inside")``;
    follow it with `ffill` for pandas' default.

    Raises TypeError for integers and bool.
    """
    if not is_inexact(x):
        raise TypeError(f"interpolate needs floating point or complex values; got {x.dtype}. Convert them: x.double()")
    mask, values = mask_of(x), filled(x)
    last, following = last_true(mask, dim), next_true(mask, dim)
    steps = x.shape[dim]
    # In the dtype of the values: integers divide to the default dtype, which may have fewer digits.
    precise = torch.promote_types(x.dtype, torch.float32)
    share = ((positions(x, dim) - last).to(precise) / (following - last).clamp(min=1)).to(x.dtype)
    before = values.gather(dim, last.clamp(min=0))
    after = values.gather(dim, following.clamp(max=max(steps - 1, 0)))
    between = before * (1 - share) + after * share
    return as_masked_tensor(torch.where(mask, values, between), (last >= 0) & (following < steps))


@takes_tensor
def dropna(x: Tensor, dim: int = 0, how: Literal["any", "all"] = "any") -> MaskedTensor:
    """`x` without the slices along `dim` that have an invalid element, or no valid one: rows, for ``dim=0``."""
    if how not in ("any", "all"):
        raise ValueError(f"how={how!r} is neither 'any' nor 'all'")
    mask = mask_of(x).movedim(dim, 0).flatten(1) if x.ndim > 1 else mask_of(x)[:, None]
    keep = mask.all(1) if how == "any" else mask.any(1)
    return as_masked_tensor(x).index_select(dim, keep.nonzero()[:, 0])  # type: ignore[return-value]


@takes_tensor
def shift(x: Tensor, periods: int, dim: int) -> MaskedTensor:
    """Each element `periods` places further along `dim`; the vacated places are invalid.

    periods  an integer; negative: towards the beginning

    The dtype and the shape stay. (`x.roll` would move the last elements to the beginning.)
    """
    size = x.size(dim)
    source = positions(x, dim).expand(x.shape) - operator.index(periods)
    inside = (source >= 0) & (source < size)
    index = source.clamp(min=0, max=max(size - 1, 0))
    return as_masked_tensor(filled(x).gather(dim, index), inside & mask_of(x).gather(dim, index))


# ------------------------------------------------------------------------------------------------------------- helpers


def _taken_from(x: Tensor, index: Tensor, exists: Tensor, dim: int, limit: int | None) -> MaskedTensor:
    """The elements at `index` along `dim`, invalid where none exists or it is more than `limit` away."""
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit={limit} fills nothing: pass at least 1, or None for no limit")
        exists = exists & ((positions(x, dim) - index).abs() <= limit)
    inside = index.clamp(min=0, max=max(x.shape[dim] - 1, 0))
    return as_masked_tensor(filled(x).gather(dim, inside), exists)
