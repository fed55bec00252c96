"""What the four operators mean on masked tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from op_registry.authoring import REDUCTION, Dense, Equation, contraction, elementwise, masked_rule, reduction
from third_party import operators  # noqa: F401  (defines torch.ops.third_party)

ops = torch.ops.third_party

# Elementwise: one line. An element of the result is valid where its element of x is.
soft_sign = elementwise(ops.soft_sign)

# A reduction by its identity: an event that cannot happen changes nothing.
noisy_or = reduction(ops.noisy_or, identity=0)


@noisy_or.oracle
def noisy_or_one_by_one(p: Any, dim: int, keepdim: bool) -> Any:
    """By loop: the chance that nothing has happened yet, event by event."""
    rows = p.data.movedim(dim, -1) if p.ndim else p.data.reshape(1)
    valid = p.mask.movedim(dim, -1) if p.ndim else p.mask.reshape(1)
    nothing = torch.ones_like(rows.sum(-1))
    for event, there in zip(rows.unbind(-1), valid.unbind(-1), strict=True):
        nothing = torch.where(there, nothing * (1 - event), nothing)
    any_valid = valid.any(-1) if valid.shape[-1] else torch.ones_like(nothing, dtype=torch.bool)
    if keepdim and p.ndim:
        nothing, any_valid = nothing.unsqueeze(dim), any_valid.unsqueeze(dim)
    return type(p)(1 - nothing, any_valid)


@noisy_or.samples
def probabilities(make: Any) -> Iterator[tuple[Any, ...]]:
    yield make((3, 4), low=0, high=1), 1
    yield make((2, 3, 4), low=0, high=1), -2, True
    yield make((5,), low=0, high=1), 0
    yield make((2, 0), low=0, high=1), 1


# Irregular: an element takes part where it and its weight are both valid.
@masked_rule(ops.weighted_mean, category=REDUCTION)
def weighted_mean(x: Dense, weight: Dense, dim: int) -> Dense:
    """Both operands are filled where either is invalid, so that neither the sum nor the divisor sees the pair."""
    both = x.masked_by(weight.validity)
    values, weights = both.filled(0), both.like(weight.data).filled(0)
    total = weights.sum(dim)
    valid = both.any_valid(dim)
    # Where nothing is valid there is no weight to divide by, and a derivative of 0 / 0 would be NaN.
    divisor = total if valid is None else Dense(total, valid).filled(1)
    return Dense((values * weights).sum(dim) / divisor, valid)


@weighted_mean.oracle
def weighted_mean_of_pairs(x: Any, weight: Any, dim: int) -> Any:
    """Each slice alone, without its pairs of which one is missing."""
    mask = x.mask & weight.mask
    rows = [t.movedim(dim, -1).reshape(-1, t.shape[dim]) for t in (x.data, weight.data, mask)]
    shape = x.data.movedim(dim, -1).shape[:-1]
    means = [ops.weighted_mean(v[m], w[m], 0) for v, w, m in zip(*rows, strict=True)]
    valid = mask.any(dim) if x.shape[dim] else torch.ones(shape, dtype=torch.bool)
    return type(x)(torch.stack(means).reshape(shape), valid)


@weighted_mean.samples
def values_and_weights(make: Any) -> Iterator[tuple[Any, ...]]:
    yield make((3, 4)), make((3, 4), low=1, high=2), 1
    yield make((2, 3, 4)), make((2, 3, 4), low=1, high=2), 1
    yield make((5,)), make((5,), low=1, high=2), 0


# A sum of products: its equation says all, on sparse storage as well.
row_dot = contraction(ops.row_dot, dims=Equation("mk,k->m"))


@row_dot.samples
def matrices_and_vectors(make: Any) -> Iterator[tuple[Any, ...]]:
    yield make((3, 4)), make((4,))
    yield make((5, 2)), make((2,))
    yield make((3, 0)), make((0,))


RULES = (soft_sign, noisy_or, weighted_mean, row_dot)
