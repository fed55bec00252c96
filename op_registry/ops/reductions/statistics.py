"""Statistics that need several passes: quantile, cov, corrcoef.

Law of quantile: torch's result on the slice with its invalid elements removed. Law of cov and corrcoef: pairwise
complete observations, as in pandas. An entry is computed from the observations that are valid in both variables (means,
variances and divisor included), and is valid where there is at least one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    REDUCTION,
    Dense,
    Equation,
    Slices,
    accumulation_dtype,
    as_bool,
    as_int8,
    being_traced,
    masked_slices,
    valid_in_all,
)
from op_registry.autocast import autocast_off, result_dtype
from op_registry.records.dense import detached_data
from op_registry.records.slices import flattened, is_inexact, sort_valid

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------------- quantile


@masked_slices(
    aten.quantile.default,
    aten.quantile.scalar,
    aten.nanquantile.default,
    aten.nanquantile.scalar,
    category=REDUCTION,
    dims=Slices(needs_elements=True),
)
def quantile(
    op: OpOverload,
    x: Dense,
    q: Dense | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Dense:
    """The value at rank q · (n - 1) of the sorted valid elements; NaN if one of them is NaN (nanquantile skips NaN)."""
    levels = q if isinstance(q, Dense) else Dense(torch.full((), q, dtype=x.dtype, device=x.device))
    if x.validity is None:
        result = op(x.data, levels.filled(0), dim, keepdim, interpolation=interpolation)
        level_validity = levels.validity
        if level_validity is not None and levels.ndim:
            level_validity = level_validity.reshape([-1] + [1] * (result.ndim - 1))
        return Dense(result, level_validity)
    dtype = x.dtype
    if not being_traced(x.data):
        plain_q = levels.filled(0) if isinstance(q, Dense) else q
        dtype = op(x.data.new_zeros(1), plain_q, interpolation=interpolation).dtype  # and raises torch's errors
    x = x.like(x.data.to(dtype))
    keepdim_sizes = [1] * x.ndim if dim is None else [1 if d == dim % x.ndim else n for d, n in enumerate(x.shape)]
    slices_last = flattened(x) if dim is None or x.ndim == 0 else x.map(lambda t: t.movedim(dim, -1))
    order = sort_valid(slices_last, -1)

    nans = order.values.detach().isnan().sum(-1, keepdim=True)
    last = (order.count - (nans if op in (aten.nanquantile.default, aten.nanquantile.scalar) else 0) - 1).clamp(min=0)
    ranks = levels.filled(0).to(dtype).reshape(-1) * last
    if op in (aten.quantile.default, aten.quantile.scalar):
        ranks = torch.where(nans > 0, last.to(dtype), ranks)
    rounding = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    ranks = ranks if rounding is None else rounding(ranks)
    below = ranks.detach().to(torch.int64)
    values = order.values.gather(-1, below)
    if rounding is None:
        weight = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
        values = torch.lerp(values, order.values.gather(-1, ranks.detach().ceil().to(torch.int64)), weight)

    valid = as_int8(order.count > 0).expand(values.shape)
    validity = valid if levels.validity is None else valid & as_int8(levels.validity).reshape(-1)
    values, validity = [as_returned(t, keepdim_sizes, keepdim, dim, levels.ndim) for t in (values, validity)]
    return Dense(values, validity)


def as_returned(values: Tensor, keepdim_sizes: list[int], keepdim: bool, dim: int | None, q_ndim: int) -> Tensor:
    """Quantiles of shape (slices …, levels) in the shape that torch returns: levels first, if `q` is a list."""
    values = values.movedim(-1, 0)
    if keepdim:
        sizes = keepdim_sizes
    elif dim is None:
        sizes = []
    else:
        sizes = [n for d, n in enumerate(keepdim_sizes) if d != dim % len(keepdim_sizes)]
    return values.reshape(([values.shape[0]] if q_ndim else []) + sizes)


# ----------------------------------------------------------------------------------------------------- cov and corrcoef


@dataclass(frozen=True)
class Pairs:
    """Weighted sums over the observations that variables i and j share; each of shape (variables, variables).

    number    the number of shared observations
    weight    the sum of their weights
    product   the sum of (i - mean of i) · conj(j - mean of j), with means over the shared observations
    square    the sum of |i - mean of i|²
    """

    number: Tensor
    weight: Tensor
    product: Tensor
    square: Tensor


def pairs(x: Dense, valid: Tensor, weights: Tensor | None) -> Pairs:
    """Sums over pairwise complete observations of `x`, (variables, observations), by matrix products.

    As in `moments`, deviations are taken from a detached pivot, then corrected for its distance to each pair's means.
    """
    present = valid.to(x.dtype.to_real())
    weighted = present if weights is None else present * weights
    number, weight = present @ present.mT, weighted @ present.mT
    safe_weight = torch.where(number > 0, weight, 1)
    total = (Dense(x.data.detach(), valid).filled(0) * weighted).sum(1, keepdim=True)
    own = weighted.sum(1, keepdim=True)
    d = Dense(x.data - total / torch.where(own > 0, own, 1), valid).filled(0)
    wd = d if weights is None else d * weights
    missed = wd @ present.mT.to(d.dtype)
    product = d @ wd.mH - missed * missed.mH / safe_weight
    squares = (wd * d.conj()).real @ present.mT
    square = squares - (missed * missed.conj()).real / safe_weight
    constant = square.detach() <= squares.detach() * (16 * torch.finfo(d.dtype).eps)
    return Pairs(number, weight, product, square - torch.where(constant, square, 0).detach())


def variables(op: OpOverload, x: Dense) -> Dense:
    """The input as (variables, observations), in the accumulation dtype."""
    if x.ndim > 2 or x.dtype is torch.bool:
        op(x.data)  # raises torch's error
    rows = x if x.ndim == 2 else x.map(lambda t: t.reshape(1, -1))
    return rows.like(rows.data.to(accumulation_dtype(x.dtype) if is_inexact(x.dtype) else torch.get_default_dtype()))


def complete(rows: Dense, *weights: Dense) -> Tensor:
    """Which observations of each variable are valid together with their weights."""
    validity = valid_in_all(rows, *weights)
    assert validity is not None
    return as_bool(validity).expand(rows.shape)


@masked_slices(aten.cov, category=REDUCTION, dims=Equation("1n,n,n->", "Mn,n,n->MN", "n,n,n->"))
def cov(
    op: OpOverload, x: Dense, *, correction: int = 1, fweights: Dense | None = None, aweights: Dense | None = None
) -> Dense:
    """For each pair of variables, over the observations (and weights) that are valid in both."""
    rows = variables(op, x)
    weight_records = [w for w in (fweights, aweights) if w is not None]
    if any(w.shape != (rows.shape[1],) for w in weight_records):
        op(
            x.data, correction=correction, fweights=detached_data(fweights), aweights=detached_data(aweights)
        )  # raises torch's error
    ones = None if aweights is None else aweights.data.new_ones(3)
    dtype = result_dtype(x, (aweights,), lambda: op(x.data.new_ones((2, 3)), aweights=ones))
    with autocast_off(x.device):
        valid = complete(rows, *weight_records)
        filled = [w.filled(1).to(rows.dtype.to_real()) for w in weight_records]
        weights = filled[0] * filled[-1] if len(filled) == 2 else filled[0] if filled else None
        p = pairs(rows, valid, weights)
        divisor = p.weight - correction
        if aweights is not None and weights is not None and correction != 0:
            present = valid.to(weights.dtype)
            divisor = (present * (weights * filled[-1])) @ present.mT
            divisor = p.weight - correction * divisor / torch.where(p.number > 0, p.weight, 1)
        return entries(divided(p.product, divisor.clamp(min=0)), p.number, dtype)


@masked_slices(aten.corrcoef, category=REDUCTION, dims=Equation("1n->", "Mn->MN", "n->"))
def corrcoef(op: OpOverload, x: Dense) -> Dense:
    """Covariance divided by both standard deviations, all over the same observations."""
    rows = variables(op, x)
    dtype = result_dtype(x, (), lambda: op(x.data.new_ones((2, 3))))
    with autocast_off(x.device):
        valid = complete(rows)
        p = pairs(rows, valid, None)
        norm = torch.where(p.square > 0, p.square, 1).sqrt()
        defined = (p.square > 0) & (p.square.mT > 0)
        ratio = torch.where(defined, p.product / norm / norm.mT, math.nan)  # NaN without a derivative
        if ratio.is_complex():
            ratio = torch.complex(ratio.real.clamp(-1, 1), ratio.imag.clamp(-1, 1))
        else:
            ratio = ratio.clamp(-1, 1)
        return entries(ratio, p.number, dtype)


@cov.samples
@corrcoef.samples
def observations(make: Callable[..., Tensor]) -> Iterator[tuple[Tensor]]:
    """Enough observations for every pair to share three or more."""
    yield (make((3, 16)),)


def divided(values: Tensor, divisor: Tensor) -> Tensor:
    """Division by a divisor that may be 0 (a pair with one observation): torch's value there, without a derivative.

    An observation belongs to many pairs: NaN in one pair's derivative would spread to the gradients of all of them.
    """
    zero = divisor == 0
    return torch.where(zero, values.detach() / 0.0, values / torch.where(zero, 1, divisor))


def entries(values: Tensor, number: Tensor, dtype: torch.dtype) -> Dense:
    """The matrix in the dtype that torch returns; for a single variable, a scalar."""
    validity = as_int8(number > 0)
    return Dense(values.to(dtype).squeeze(), validity.squeeze())
