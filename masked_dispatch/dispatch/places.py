"""The operators by which functions of this library that compute on plain tensors ask which positions are there.

In a graph, what a tensor knows of its positions can be read inside an operator only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from masked_dispatch.autograd.sparse import unwrap_any, wrap_any
from op_registry import MaskedSemanticsError
from op_registry.extents.factors import is_prefix
from op_registry.extents.masks import placed_as, united_in_groups
from op_registry.extents.samples import own_order
from op_registry.records.dense import Dense


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, valid where it was and `other`, which broadcasts to it, is there; it has the extent of `other` too.

    Without an extent of `other`: the tensor itself, which may be plain.
    """
    record = unwrap_any(tensor)
    placed = placed_as(record, unwrap_any(other))
    return tensor if placed is record else wrap_any(placed)


def order_of_samples(tensor: Tensor, dim: int) -> list[Tensor]:
    """Indices that put each sample's positions in order along `dim`, and that put them back; [] where they are."""
    return list(own_order(unwrap_any(tensor), dim) or ())


def places_of_groups(tensor: Tensor, dim: int, numbers: Tensor, groups: int) -> Tensor:
    """A bool tensor with the extent of a statistic of groups: element n of `dim` belongs to group `numbers[n]`.

    Each sample has all groups of its positions. A group of samples is there where one of them is.
    """
    record = unwrap_any(tensor)
    known = [f.along[dim] for f in (record.extent.factors if record.extent else ()) if dim in f.positions]
    if not known:
        return wrap_any(united_in_groups(record, dim, numbers, groups))
    if not all(map(is_prefix, known)):
        raise MaskedSemanticsError(
            f"groupby: labels count along dimension {dim} of a batch of shape {tuple(record.shape)}, whose samples are "
            f"not known to begin at index 0 there. Move them to the front, masked_dispatch.align(x, {dim}); or treat "
            "padding as missing values, x.without_extent()."
        )
    ones = Dense(torch.ones(record.shape, dtype=torch.bool, device=record.device))
    return wrap_any(placed_as(ones, record)).any(dim, keepdim=True)
