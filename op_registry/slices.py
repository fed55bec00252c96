"""Words for rules that work slice by slice: reductions, scans, norms, softmax, sorts.

What all of them share: with nothing masked they are the plain operator; a slice of which nothing is left must stay
finite inside, so that no NaN arises where anomaly detection looks; counts divide in the accumulation dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.categories import Operator, results_like
from op_registry.records import (
    Dense,
    Dims,
    accumulation_dtype,
    all_dims,
    as_bool,
    as_int8,
    being_traced,
    gradients_may_flow,
)
from op_registry.registry import registry
from op_registry.rule import Category, Rule, Run, Slices, overloads_of, written_at


def masked_slices(*operators: Operator, category: Category, slices: Slices | None = None) -> Callable[[Run], Rule]:
    """Decorator: a function for partly valid input, with the operator's own signature after the overload, as its rule.

    Where nothing is masked, or the input has no element at all, the operator itself runs and its result is valid.
    `slices` says how it works on a slice, if it is to run on the stored elements of sparse ones.
    """
    traits = {"slices": slices} if slices else {}

    def register(function: Run) -> Rule:
        @functools.wraps(function)
        def run(op: Any, x: Dense, *args: Any, **kwargs: Any) -> Any:
            if x.data.numel() != 0 and any_masked((x, *args, *kwargs.values())):
                return function(op, x, *args, **kwargs)
            result = op(*map(plainly, (x, *args)), **{k: plainly(v) for k, v in kwargs.items()})
            return Dense(result) if isinstance(result, Tensor) else results_like(result, None)

        ops = tuple(o for operator in operators for o in overloads_of(operator))
        return registry.add(Rule(ops, category, run, takes_op=True, where=written_at(2), traits=traits))

    return register


def any_masked(arguments: tuple[Any, ...]) -> bool:
    """Whether a record among the arguments has a stored validity."""
    return any(isinstance(argument, Dense) and argument.validity is not None for argument in arguments)


def plainly(argument: Any) -> Any:
    """An argument as plain torch takes it."""
    return argument.data if isinstance(argument, Dense) else argument


def at_least_one(count: Tensor | int) -> Tensor | int:
    """A count to divide by: 1 where a slice has nothing, whose result nobody sees."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def without(dims: tuple[int, ...], reduced: Tensor, keepdim: bool) -> Tensor:
    """A result that was computed with its reduced dimensions kept, in the shape that `keepdim` asks for."""
    return reduced if keepdim or not dims else reduced.squeeze(dims)


def filled_for_exp(x: Dense, dims: Dims) -> Tensor:
    """The data with -inf where invalid, whose exponential is 0; a slice of which nothing is valid is 0 throughout.

    Of a slice of -inf alone, softmax and the derivative of logsumexp would make NaN.
    """
    some = x.some(dims, keepdim=True)
    assert some is not None
    floor = torch.where(as_bool(some), -math.inf, 0.0).to(x.dtype)
    if gradients_may_flow(x.data) or x.dtype.is_complex:
        return x.filled(floor)
    return x.filled(-math.inf).clamp_min(floor)  # a fill with a number needs no branches


def filled_for_exp_alone(x: Dense, dims: Dims) -> Tensor:
    """The same for a rule in which nothing else meets the exponentials before the result is closed.

    NaN in a slice of which nothing is valid harms nobody there: this fill, and the one that closes the result, let no
    gradient pass in either direction. But anomaly detection would object. So only a graph, which is not asked, saves
    itself another pass over the mask.
    """
    return x.filled(-math.inf) if being_traced(x.data) else filled_for_exp(x, dims)


def first_valid(x: Dense, dim: int) -> Tensor:
    """Position along `dim` of the first valid element, the dimension kept."""
    assert x.validity is not None
    return as_int8(x.validity).argmax(dim, keepdim=True)


@dataclass(frozen=True)
class Moments:
    """Count, mean and spread of the valid elements of each slice, the reduced dimensions kept, in accumulation dtype.

    count      number of valid elements
    deviation  each valid element less a pivot near the mean, 0 where invalid
    shift      what is left from the pivot to the mean: element less mean is ``deviation - shift``
    mean       the mean of the valid elements
    square     the sum of |element less mean|² over the valid elements, real and ≥ 0
    """

    count: Tensor
    deviation: Tensor
    shift: Tensor
    mean: Tensor
    square: Tensor

    @property
    def exists(self) -> Tensor:
        """Validity of a statistic of the slice."""
        return as_int8(self.count > 0)


# A spread so much smaller than the error of the mean is no spread: the slice is constant.
_NO_SPREAD = 1e-3


class Over:
    """The slices of a dense record along `dims`: what each has as a sum, and for each of its elements.

    Slices that are stored otherwise have the same words (segments.py).
    """

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = dims

    def sum(self, t: Tensor) -> Tensor:
        """Σ over each slice, its dimensions kept."""
        return t.sum(self.dims, keepdim=True) if self.dims else t

    def spread(self, each: Tensor) -> Tensor:
        """For every element the number of its slice."""
        return each

    def count(self, x: Dense) -> Tensor:
        """How many elements of `x` are valid in each slice."""
        count = x.count(self.dims, keepdim=True)
        assert isinstance(count, Tensor), "where all is valid, use torch's own operator"
        return count


def moments(x: Dense, over: Any) -> Moments:
    """Moments of the slices that `over` speaks of (see :class:`Over`), by the corrected two-pass formula.

    The first pass finds a pivot, the mean up to rounding. The second sums deviations from it and their squares, and
    removes what the pivot missed. The sum of squares about the mean does not depend on the pivot, so its derivatives
    don't either: the pivot is detached, and backward needs no pass of its own for it.
    """
    count = over.count(x)
    some = at_least_one(count)
    dtype = accumulation_dtype(x.dtype)
    seen = Dense(x.data.detach(), x.validity).filled(0).to(dtype)
    pivot = over.sum(seen) / some
    deviation = Dense(x.data.to(dtype) - over.spread(pivot), x.validity).filled(0)
    deviations, square = over.sum(deviation), over.sum(squared(deviation))
    shift = deviations / some
    spread = square - squared(deviations) / some
    none = spread.detach() <= square.detach() * _NO_SPREAD
    # Exactly 0 for a constant slice, as torch's own; the derivatives, which are right, stay.
    spread = spread - torch.where(none, spread, 0).detach()
    return Moments(count, deviation, shift, pivot + shift, spread)


def squared(values: Tensor) -> Tensor:
    """|values|², real."""
    return (values * values.conj()).real if values.is_complex() else values * values


def reduced_dims(x: Dense, dim: Dims) -> tuple[int, ...]:
    """The dimensions that `dim` names, as non-negative numbers; one that does not exist raises torch's own error."""
    bound = max(x.ndim, 1)
    for d in () if dim is None else (dim,) if isinstance(dim, int) else dim:
        if not -bound <= d < bound:
            x.data.squeeze(d)
    return all_dims(dim, x.ndim)


def flattened(x: Dense) -> Dense:
    """The record as one dimension."""
    return x.moved(lambda t: t.reshape(-1))


def kept_shape(x: Dense, dims: tuple[int, ...]) -> list[int]:
    """The shape of a reduction of `x` over `dims` that keeps them."""
    return [1 if d in dims else size for d, size in enumerate(x.shape)]


def along(size: int, dim: int, like: Tensor) -> Tensor:
    """The positions 0, 1, … of a dimension of `like`, shaped to broadcast with it."""
    return torch.arange(size, device=like.device).reshape((-1,) + (1,) * (like.ndim - 1 - dim % like.ndim))


def places_valid_first(validity: Tensor, dim: int) -> Tensor:
    """For each element the place that it takes when valid ones move to the front of `dim`, all in their old order.

    ``new.scatter(dim, places, old)`` moves there, ``new.gather(dim, places)`` back.
    """
    size = validity.shape[dim]
    valid_so_far = as_int8(validity).cumsum(dim, dtype=torch.int64)
    count = valid_so_far.narrow(dim, size - 1, 1)
    return torch.where(as_bool(validity), valid_so_far - 1, count + along(size, dim, validity) - valid_so_far)
