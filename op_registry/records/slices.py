"""Helpers for rules that work slice by slice: reductions, scans, norms, softmax, sorts.

Without a mask, all of them compute what the plain operator computes. A slice without valid elements stays finite in
between, so that anomaly detection finds no NaN. Divisions by a count use the accumulation dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.records.arguments import Dims, Number, accumulation_dtype, highest, lowest, on_signed_bits, wrap_dims
from op_registry.records.dense import Dense
from op_registry.records.divided import is_divided, undivided, undivided_along, without_empty_parts
from op_registry.records.fill import fill_in_place, remember_zero
from op_registry.records.layout import broadcast_along
from op_registry.records.tracing import being_traced, gradients_may_flow, may_be_read, under_transform
from op_registry.records.validity import as_bool, as_int8, kept_with

Extremum = Literal["amax", "amin"]


def any_masked(arguments: tuple[Any, ...]) -> bool:
    """Whether a record among the arguments has a stored validity."""
    return any(isinstance(argument, Dense) and argument.validity is not None for argument in arguments)


def has_whole_slices(x: Dense, dims: tuple[int, ...]) -> bool:
    """Whether the record stores one validity per slice along `dims`: each slice is valid as a whole or not at all."""
    validity = x.validity
    return validity is not None and validity.ndim == x.ndim and all(broadcast_along(validity, d) for d in dims)


def plain_data(argument: Any) -> Any:
    """An argument in the form that plain torch takes."""
    return argument.data if isinstance(argument, Dense) else argument


def nonzero_count(count: Tensor | int) -> Tensor | int:
    """A count to divide by: 1 for a slice without valid elements, whose result is invalid."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def squeeze_reduced(dims: tuple[int, ...], reduced: Tensor, keepdim: bool) -> Tensor:
    """Bring a result that still has its reduced dimensions into the shape that `keepdim` asks for."""
    return reduced if keepdim or not dims else reduced.squeeze(dims)


def filled_for_exp(x: Dense, dims: Dims) -> Tensor:
    """The data with -inf where invalid, whose exponential is 0; a slice without valid elements gets zeros throughout.

    A slice of only -inf would make softmax and the derivative of logsumexp NaN.
    """
    if x.each_slice_has_one(dims):
        return x.filled(-math.inf)
    some = x.any_valid(dims, keepdim=True)
    assert some is not None
    floor = torch.where(as_bool(some), -math.inf, 0.0).to(x.dtype)
    if gradients_may_flow(x.data) or x.dtype.is_complex:
        return x.filled(floor)
    return x.filled(-math.inf).clamp_min(floor)  # a fill with a number needs no branches


def filled_for_exp_alone(x: Dense, dims: Dims) -> Tensor:
    """The same for a rule that combines the exponentials with nothing else before the result is filled again.

    NaN in a slice without valid elements is then harmless: neither this fill nor the later one lets a gradient through.
    But anomaly detection would report the NaN, so we save the second pass over the mask only in graphs, where it does
    not run.
    """
    return x.filled(-math.inf) if being_traced(x.data) else filled_for_exp(x, dims)


def first_valid_index(x: Dense, dim: int) -> Tensor:
    """Position along `dim` of the first valid element, the dimension kept."""
    assert x.validity is not None
    return as_int8(x.validity).argmax(dim, keepdim=True)


@dataclass(frozen=True)
class Spread:
    """Count, mean and spread of the valid elements of each slice, with kept dimensions, in the accumulation dtype.

    count      number of valid elements
    mean       the mean of the valid elements
    square     the sum of |element less mean|² over the valid elements, real and ≥ 0
    """

    count: Tensor
    mean: Tensor
    square: Tensor

    @property
    def exists(self) -> Tensor:
        """Validity of a statistic of the slice."""
        return as_int8(self.count > 0)

    @property
    def average(self) -> Tensor:
        """The mean as the sum divided by the count: an infinite element makes it infinite."""
        return self.mean


@dataclass(frozen=True)
class Moments(Spread):
    """The same, and each element's distance from the mean.

    pivot      a detached number near the mean
    deviation  each valid element less the pivot, 0 where invalid
    shift      the mean less the pivot: element less mean is ``deviation - shift``
    """

    pivot: Tensor
    deviation: Tensor
    shift: Tensor

    @property
    def average(self) -> Tensor:
        return torch.where(self.pivot.isfinite(), self.mean, self.pivot)


# If the spread is this much smaller than the error of the mean, the slice is constant.
_NO_SPREAD = 1e-3


class Over(Protocol):
    """The slices of an operator, in dense storage (:class:`DenseSlices`) or among stored elements (Segments).

    What rules are written in: values of elements, and one value for each slice. In dense storage elements have the
    shape of the tensor; among stored elements, (stored, *dense).
    """

    def sum(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Σ over each slice, computed in `dtype` (None: as the storage sums `t`)."""
        ...

    def extremum(self, t: Tensor, reduction: Extremum) -> Tensor:
        """The maximum or minimum of each slice."""
        ...

    def count(self, x: Dense) -> Tensor:
        """How many elements of `x` are valid in each slice, int64."""
        ...

    def exists(self, x: Dense) -> Tensor | None:
        """The validity of one result for each slice: where it has a valid element, or no elements at all."""
        ...

    def broadcast_to_elements(self, per_slice: Tensor) -> Tensor:
        """The value of its slice for each element; it may be broadcast."""
        ...


class DenseSlices:
    """The slices of a dense record along `dims`; what is one for each has these dimensions if `keepdim`."""

    def __init__(self, dims: tuple[int, ...], keepdim: bool = True) -> None:
        self.dims = dims
        self.keepdim = keepdim
        self._existing: tuple[Dense, Tensor | None] | None = None  # of the last record that was asked for

    def sum(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.dims:
            return t.sum(self.dims, self.keepdim, dtype=dtype)
        return t if dtype is None else t.to(dtype)

    def extremum(self, t: Tensor, reduction: Extremum) -> Tensor:
        """Differentiable as torch's."""
        return getattr(torch, reduction)(t, self.dims, self.keepdim) if self.dims else t

    def count(self, x: Dense) -> Tensor:
        count = x.count(self.dims, self.keepdim)
        # (A record without a mask comes with a parameter that has one.)
        return count if isinstance(count, Tensor) else x.data.new_full((), count, dtype=torch.int64)

    def exists(self, x: Dense) -> Tensor | None:
        if self._existing is None or self._existing[0] is not x:
            self._existing = x, x.any_valid(self.dims, self.keepdim)
        return self._existing[1]

    def broadcast_to_elements(self, per_slice: Tensor) -> Tensor:
        if not self.keepdim:
            for d in sorted(self.dims):
                per_slice = per_slice.unsqueeze(d)
        return per_slice


def moments(x: Dense, over: Over) -> Moments:
    """Moments of the slices that `over` describes (see :class:`Over`), by the corrected two-pass formula.

    The first pass finds a pivot, the mean up to rounding. The second sums the deviations from the pivot and their
    squares, and corrects for the pivot's error. The sum of squares about the mean does not depend on the pivot, and nor
    do its derivatives: we detach the pivot, and backward needs no pass for it.
    """
    count = over.count(x)
    pivot, deviation = _deviations(x, over, count)
    deviations, square = _missed(over.sum(deviation), pivot), over.sum(abs_squared(deviation))
    some = nonzero_count(count)
    shift = deviations / some
    return Moments(count, pivot + shift, _about_mean(square, deviations, some), pivot, deviation, shift)


def spread(x: Dense, over: Over) -> Spread:
    """:func:`moments` without the deviations; their memory then holds their squares, unless derivatives need them.

    If the result overflows, we compute it again in float64, in which torch accumulates on CPU.
    """
    result = _spread(x, over)
    wide = x.dtype.is_complex or result.square.dtype is torch.float64
    if wide or not may_be_read(result.square) or bool(result.square.isfinite().all()):
        return result
    return _spread(x.like(x.data.to(torch.float64)), over)


def _spread(x: Dense, over: Over) -> Spread:
    if gradients_may_flow(x.data) or being_traced(x.data) or x.dtype.is_complex:
        return moments(x, over)
    count = over.count(x)
    pivot, deviation = _deviations(x, over, count)
    deviations = _missed(over.sum(deviation), pivot)
    square = over.sum(deviation.square_())
    some = nonzero_count(count)
    return Spread(count, pivot + deviations / some, _about_mean(square, deviations, some))


def _pivot(x: Dense, over: Over, count: Tensor) -> Tensor:
    """A separate function, so that Python frees the filled copy before we compute the deviations."""
    filled = Dense(x.data.detach(), x.validity).filled(0).to(accumulation_dtype(x.dtype))
    some = nonzero_count(count)
    if may_be_read(filled):
        pivot: Tensor = over.sum(filled) / some
        if bool(pivot.isfinite().all()):
            return pivot
    # The mean may be finite and the sum infinite; doubling the half may round to infinity.
    half = over.sum(filled / over.broadcast_to_elements(count.clamp(min=1) * 2))
    return torch.where(half.isfinite(), (half * 2).nan_to_num(), half)


def _deviations(x: Dense, over: Over, count: Tensor) -> tuple[Tensor, Tensor]:
    """A detached pivot near the mean of each slice; and each valid element less the pivot, 0 where invalid."""
    dtype, pivot = accumulation_dtype(x.dtype), _pivot(x, over, count)
    deviation = x.data.to(dtype) - over.broadcast_to_elements(pivot)
    return pivot, fill_in_place(deviation, x.validity, 0)


def _missed(deviations: Tensor, pivot: Tensor) -> Tensor:
    """The sum of deviations from a pivot, which corrects its rounding error; a sum that overflows corrects nothing."""
    return torch.where(pivot.isfinite() & ~deviations.isfinite(), 0, deviations)


def _about_mean(square: Tensor, deviations: Tensor, some: Tensor | int) -> Tensor:
    """The sum of squares about the mean, computed from the sum of squares about a pivot."""
    about_mean = square - torch.where(square.isfinite(), abs_squared(deviations) / some, 0)
    none = about_mean.detach() < square.detach() * _NO_SPREAD  # False if both are infinite
    # A constant slice gives exactly 0, as in torch; the derivatives are right and stay.
    return about_mean - torch.where(none, about_mean, 0).detach()


def abs_squared(values: Tensor) -> Tensor:
    """|values|², real."""
    return (values * values.conj()).real if values.is_complex() else values * values


def undivided_slices(x: Dense, dim: int) -> Dense:
    """The record, redistributed so that each slice along `dim` lies whole on one process."""
    return x.map(lambda t: undivided_along(t, dim)) if is_divided(x.data) else x


def slices_on_all(x: Dense, dim: Dims) -> Dense:
    """The record, made complete on all processes if one of them has no part of the slices."""
    return x.map(lambda t: without_empty_parts(t, reduced_dims(x, dim))) if is_divided(x.data) else x


def flattened(x: Dense) -> Dense:
    """The record, flattened to one dimension."""
    return x.map(lambda t: undivided(t).reshape(-1))


def keepdim_shape(x: Dense, dims: tuple[int, ...]) -> list[int]:
    """The shape of a reduction of `x` over `dims` that keeps them."""
    return [1 if d in dims else size for d, size in enumerate(x.shape)]


def arange_along(size: int, dim: int, like: Tensor) -> Tensor:
    """The positions 0, 1, … of a dimension of `like`, shaped to broadcast with it."""
    return torch.arange(size, device=like.device).reshape((-1,) + (1,) * (like.ndim - 1 - dim % like.ndim))


def valid_first_positions(validity: Tensor, dim: int) -> Tensor:
    """The new index of each element after valid elements move to the front of `dim`, all in their old order.

    ``new.scatter(dim, places, old)`` moves elements there, ``new.gather(dim, places)`` moves them back.
    """
    size = validity.shape[dim]
    valid_so_far = as_int8(validity).cumsum(dim, dtype=torch.int64)
    count = valid_so_far.narrow(dim, size - 1, 1)
    return torch.where(as_bool(validity), valid_so_far - 1, count + arange_along(size, dim, validity) - valid_so_far)


def safe_sqrt(square: Tensor) -> Tensor:
    """The square root of numbers ≥ 0; its derivative at 0 is 0, as torch's of a standard deviation."""
    none = square == 0
    return torch.where(none, 0, torch.where(none, 1, square).sqrt())


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether torch computes a mean in this dtype."""
    return dtype.is_floating_point or dtype.is_complex


def identity_of(op: OpOverload, dtype: torch.dtype) -> Number:
    """The identity of a max-like or min-like operator; an arbitrary number for complex dtypes, which it refuses."""
    if dtype.is_complex:
        return 0
    return lowest(dtype) if "max" in op._schema.name else highest(dtype)


def extremum(x: Dense, over: Over, reduction: Extremum, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The maximum (minimum) of the valid elements of each slice, as the mean of those that equal it.

    The gradient flows through that mean. The operator's own gradient would also go to fills that equal the result, and
    compilers sum its ties slowly. We average the differences from the result, which are exactly 0, unless the result
    is infinite. In eager mode, if no fill can equal a result, we keep the operator's own gradient.

    call  what computes it from filled data, in place of `over`
    """
    call = call or functools.partial(over.extremum, reduction=reduction)
    identity = lowest(x.dtype) if reduction == "amax" else highest(x.dtype)
    if is_divided(x.data):
        x = slices_on_all(x, over.dims)  # type: ignore[attr-defined]
    if not (x.dtype.is_floating_point and gradients_may_flow(x.data)):
        return call(x.filled(identity))
    if isinstance(over, DenseSlices) and may_be_read(x.data):
        result, exists = call(x.filled(identity)), over.exists(x)
        settled = result.detach().isfinite()
        if bool((settled if exists is None else settled | ~as_bool(exists)).all()):
            return result  # no fill equals a finite result
    seen = Dense(x.data.detach(), x.validity).filled(identity)
    peak = call(seen)
    ties = as_int8(Dense((seen == over.broadcast_to_elements(peak)) | (seen != seen), x.validity).filled(False))
    base = torch.where(peak.isinf(), 0, peak)
    rest = over.sum(Dense(x.data - over.broadcast_to_elements(base), ties).filled(0))
    return (base + rest / nonzero_count(over.count(Dense(x.data, ties)))).to(x.dtype)


@dataclass(frozen=True)
class Order:
    """The valid elements of each slice in order, then the others.

    index   the old index of each element
    values  the elements themselves; 0 where invalid
    count   number of valid elements in the slice, with the dimension kept
    """

    index: Tensor
    values: Tensor
    count: Tensor


def sort_valid(x: Dense, dim: int, descending: bool = False) -> Order:
    """Sort the valid elements of each slice along `dim`; NaN is the greatest value, as in torch."""
    x = undivided_slices(x, dim)
    validity = x.full_validity
    assert validity is not None
    count = x.count(dim, keepdim=True)
    assert isinstance(count, Tensor)
    count = count.expand(keepdim_shape(x, reduced_dims(x, dim)))
    behind = filled_behind(x, descending, count)
    if behind is None:
        filled = x.filled(0)
        index = filled.detach().sort(stable=True, dim=dim, descending=descending).indices
        places = valid_first_positions(validity.gather(dim, index), dim)
        index = torch.empty_like(index).scatter(dim, places, index)
        return Order(index, on_signed_bits(lambda bits: bits.gather(dim, index), filled), count)
    values, index = behind.sort(stable=True, dim=dim, descending=descending)
    del behind
    if gradients_may_flow(x.data):
        return Order(index, x.filled(0).gather(dim, index), count)
    invalid = arange_along(x.shape[dim], dim, x.data) >= count
    return Order(index, on_signed_bits(lambda bits: bits.masked_fill_(invalid, 0), values), count)


def filled_behind(x: Dense, descending: bool, count: Tensor) -> Tensor | None:
    """The detached data, filled with a value that sorts behind every valid element; None if no such value exists.

    This reads the values. It saves a second pass that moves valid elements to the front, and the memory for their new
    indices, several times the data's memory.
    """
    if x.dtype.is_complex or x.dtype is torch.bool or under_transform() or not may_be_read(x.data, count):
        return None
    nan = x.dtype.is_floating_point and not descending
    last = math.nan if nan else lowest(x.dtype) if descending else highest(x.dtype)
    filled = Dense(x.data.detach(), x.validity).filled(last)
    like_last = torch.count_nonzero(filled.isnan() if nan else filled == last)
    return filled if int(like_last) == filled.numel() - int(count.sum()) else None


def reduced_dims(x: Dense, dim: Dims) -> tuple[int, ...]:
    """The dimensions that `dim` names, as non-negative numbers; a dimension out of range raises torch's own error."""
    bound = max(x.ndim, 1)
    for d in () if dim is None else (dim,) if isinstance(dim, int) else dim:
        if not -bound <= d < bound:
            x.data.squeeze(d)
    return wrap_dims(dim, x.ndim)


# ------------------------------------------------------------------ the valid rows of a batch with one validity per row


def valid_rows(x: Dense) -> tuple[Tensor, list[int]]:
    """Positions of valid rows among all flattened rows, and their number in each sequence; cached with the mask."""
    validity, (batch, time, _) = x.validity, x.shape
    assert validity is not None

    def find() -> tuple[Tensor, list[int]]:
        valid = validity.view(validity.shape[:2]).expand(batch, time)
        counts: list[int] = valid.sum(1, dtype=torch.int64).tolist()
        return valid.reshape(-1).nonzero().squeeze(1), counts

    if validity.is_inference() or torch.is_inference_mode_enabled():
        return find()
    kept = kept_with(validity)
    found: tuple[Tensor, list[int]] | None = kept.get(("rows", batch, time))
    if found is None:
        found = kept["rows", batch, time] = find()
    return found


def take_rows(x: Dense, positions: Tensor) -> Tensor:
    """The rows (n, width) at these positions."""
    return x.data.reshape(-1, x.shape[-1]).index_select(0, positions)


def put_rows(rows: Tensor, positions: Tensor, x: Dense) -> Dense:
    """A record like `x` with `rows` (n, width) at these positions, the valid rows of `x`; zeros elsewhere."""
    batch, time, _ = x.shape
    data = rows.new_zeros(batch * time, rows.shape[1]).index_copy(0, positions, rows).view(batch, time, rows.shape[1])
    if x.validity is not None:
        remember_zero(data, x.validity)
    return Dense(data, x.validity)
