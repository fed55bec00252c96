"""Fill, move and drop what is missing along a dimension."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor

from masked_dispatch.api.along_dim import last_true, next_true, positions
from masked_dispatch.api.construct import as_masked_tensor, from_nan
from masked_dispatch.interop.crossing import extent_of, filled, mask_of, numbers_positions, placed_like
from masked_dispatch.missing.moments import InOrder, is_inexact, takes_tensor
from masked_dispatch.tensor.checks import checked_dim
from masked_dispatch.tensor.masked_tensor import MaskedTensor
from op_registry import MaskedSemanticsError
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


@takes_tensor
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


# ------------------------------------------------------------------------------------------------------------- helpers


def _taken_from(x: InOrder, index: Tensor, exists: Tensor, limit: int | None) -> MaskedTensor:
    """The elements at `index`, invalid where none exists or it is more than `limit` away."""
    if limit is not None:
        if limit < 1:
            raise ValueError(f"limit={limit} fills nothing: pass at least 1, or None for no limit")
        exists = exists & ((positions(x.mask, x.dim) - index).abs() <= limit)
    inside = index.clamp(min=0, max=max(x.mask.shape[x.dim] - 1, 0))
    return x.result(x.values.gather(x.dim, inside), exists)
