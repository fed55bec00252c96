"""What the four operators mean on masked tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import COMPOSITE, Equation, contraction, elementwise, masked_rule, reduction
from third_party import operators  # noqa: F401  (defines torch.ops.third_party)

ops = torch.ops.third_party

# An element of the result is valid where its element of x is.
soft_sign = elementwise(ops.soft_sign)

# An event that cannot happen changes nothing: the identity is 0.
noisy_or = reduction(ops.noisy_or, identity=0)

# A sum of products: its equation says all, on sparse and packed storage as well.
row_dot = contraction(ops.row_dot, dims=Equation("mk,k->m"))


# Irregular: an element takes part where it and its weight are both valid.
@masked_rule(ops.weighted_mean, category=COMPOSITE)
def weighted_mean(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """Of torch's operators on masked tensors. Adding zeros leaves weights valid where x is."""
    return (weight * x).sum(dim) / (weight + torch.zeros_like(x)).sum(dim)


@weighted_mean.oracle
def weighted_mean_of_pairs(x: Any, weight: Any, dim: int) -> Any:
    """Each slice alone, without its pairs of which one is missing."""
    mask = x.mask & weight.mask
    rows = [t.movedim(dim, -1).reshape(-1, t.shape[dim]) for t in (x.data, weight.data, mask)]
    means = [ops.weighted_mean(v[m], w[m], 0) for v, w, m in zip(*rows, strict=True)]
    return type(x)(torch.stack(means).reshape(mask.any(dim).shape), mask.any(dim))


@weighted_mean.samples
def values_and_weights(make: Any) -> Iterator[tuple[Any, ...]]:
    yield make((3, 4)), make((3, 4), low=1, high=2), 1
    yield make((2, 3, 4)), make((2, 3, 4), low=1, high=2), 1
    yield make((5,)), make((5,), low=1, high=2), 0


RULES = (soft_sign, noisy_or, weighted_mean, row_dot)
