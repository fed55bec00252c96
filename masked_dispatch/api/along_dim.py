"""Places, runs and ranks along a dimension, on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def positions(x: Tensor, dim: int) -> Tensor:
    """The indices along `dim`, in a shape that broadcasts to that of `x`."""
    dim = dim % x.ndim
    return torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.ndim - dim - 1))


def last_true(mask: Tensor, dim: int) -> Tensor:
    """For each element the index along `dim` of the last True up to it; -1 where there is none."""
    return torch.where(mask, positions(mask, dim), -1).cummax(dim).values


def next_true(mask: Tensor, dim: int) -> Tensor:
    """For each element the index along `dim` of the next True from it on; the size of `dim` where there is none."""
    indices = torch.where(mask, positions(mask, dim), mask.shape[dim])
    return indices.flip(dim).cummin(dim).values.flip(dim)


def order_by_group(groups: Tensor, dim: int, values: Tensor | None = None) -> Tensor:
    """The indices that put elements in the order of their groups along `dim`; in a group, of `values` or as they come.

    All of one shape. Of equal elements the earlier one comes first, and NaN after every number.
    """
    if values is None:
        return groups.sort(dim=dim, stable=True).indices
    order = values.detach().sort(dim=dim, stable=True).indices
    return order.gather(dim, order_by_group(groups.gather(dim, order), dim))


def average_ranks(values: Tensor, groups: Tensor, dim: int) -> Tensor:
    """The rank from 1 of each element among those of its group along `dim`, float64; ties share their average rank.

    `values` and `groups` have one shape. NaN ranks after every number, and ties with NaN.
    """
    if not values.shape[dim]:
        return torch.zeros_like(values, dtype=torch.float64)
    order = order_by_group(groups, dim, values)
    values, groups = values.detach().gather(dim, order), groups.gather(dim, order)
    at_border = _unequal_to_next(groups, dim)
    at_end = at_border | _unequal_to_next(values, dim)
    begins, ends = last_true(_after(at_end, dim), dim), next_true(_with_end(at_end, dim), dim)
    ranks = (begins + ends).to(torch.float64) / 2 - last_true(_after(at_border, dim), dim) + 1
    return torch.zeros_like(ranks).scatter(dim, order, ranks)


def _unequal_to_next(x: Tensor, dim: int) -> Tensor:
    """Whether each element differs from the next one, one fewer along `dim`; NaN equals NaN."""
    count = x.shape[dim] - 1
    this, following = x.narrow(dim, 0, count), x.narrow(dim, 1, count)
    return (this != following) & ~((this != this) & (following != following))


def _after(ends: Tensor, dim: int) -> Tensor:
    """Where runs begin: at the first element, and after each end."""
    return torch.cat([_one_true(ends, dim), ends], dim)


def _with_end(ends: Tensor, dim: int) -> Tensor:
    """Where runs end, the last element included."""
    return torch.cat([ends, _one_true(ends, dim)], dim)


def _one_true(x: Tensor, dim: int) -> Tensor:
    sizes = list(x.shape)
    sizes[dim] = 1
    return x.new_ones(sizes)
