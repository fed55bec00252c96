"""Normalisation: layer_norm, rms_norm, group_norm, renorm, weight_norm (batch_norm, instance_norm: batch_norms.py).

Law: statistics over the valid elements; valid where the input and the affine parameters are.

Each is written in `moments`, in the accumulation dtype, and cast once to the dtype that torch would return. Normalised
values are 0 where the input is invalid, so that invalid elements contribute nothing to the gradient of a plain weight,
which sums them over the batch. A slice without valid elements is divided by 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    NORMALIZATION,
    Dense,
    DenseSlices,
    LastDims,
    Moments,
    Segments,
    Sparse,
    accumulation_dtype,
    aligned_validity,
    all_valid,
    any_masked,
    as_int8,
    being_traced,
    by_rule,
    detached_data,
    fill_in_place,
    gradients_may_flow,
    has_whole_slices,
    masked_rule,
    masked_slices,
    moments,
    nonzero_count,
    plain_data,
    reshape_validity,
    result_dtype,
    results_like,
    valid_in_all,
    zeroed,
)

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------- shared helpers


def with_validity(x: Dense) -> Dense:
    """The record with a validity tensor, a broadcast 1 if it had none, so that rules need no second case."""
    return x if x.validity is not None else Dense(x.data, x.data.new_ones((1,) * x.ndim, dtype=torch.int8))


def standardised(x: Dense, over: DenseSlices | Segments, eps: float | Tensor) -> tuple[Tensor, Moments, Tensor]:
    """(x - mean) / standard deviation of the slice, 0 where invalid; the moments; 1 / the standard deviation."""
    x = with_validity(x)
    m = moments(x, over)
    variance = m.square / nonzero_count(m.count)
    scale = torch.where(m.count == 0, 1, variance + eps).rsqrt()
    shift, scale_of_each = over.broadcast_to_elements(m.shift), over.broadcast_to_elements(scale)
    if gradients_may_flow(m.deviation, scale_of_each) or being_traced(x.data):
        values = Dense((m.deviation - shift) * scale_of_each, x.validity).filled(0)
    else:  # nobody else reads the deviations
        values = fill_in_place(m.deviation.sub_(shift).mul_(scale_of_each), x.validity, 0)
    return values, m, scale


def shaped(parameter: Dense | None, shape: Sequence[int]) -> Dense | None:
    """A parameter and its validity in another shape."""
    return None if parameter is None else parameter.map(lambda t: t.reshape(tuple(shape)))


def affine(values: Tensor, weight: Dense | None, bias: Dense | None) -> Tensor:
    """`values` scaled and shifted by parameters that broadcast with them."""
    if weight is not None:
        values = values * weight.filled(1)
    return values if bias is None else values + bias.filled(0)


def saved_statistics(
    x: Dense | Sparse, parameters: Sequence[Dense | Sparse | None], m: Moments, scale: Tensor, shape: Sequence[int]
) -> tuple[Dense, Dense]:
    """Mean and scale as most of torch's native operators return them: in the parameters' dtype, detached."""
    mean, scale_of_each = statistics(x, parameters, m, scale, shape)
    return Dense(mean.data.detach(), mean.validity), Dense(scale_of_each.data.detach(), scale_of_each.validity)


def statistics(
    x: Dense | Sparse, parameters: Sequence[Dense | Sparse | None], m: Moments, scale: Tensor, shape: Sequence[int]
) -> tuple[Dense, Dense]:
    """Mean and scale of each slice in the parameters' dtype, valid where the slice has a valid element."""
    dtype = next((p.dtype for p in parameters if p is not None), x.dtype)
    sizes = m.mean.shape
    exists = m.exists.expand(sizes).reshape(tuple(shape))
    mean, scale = (t.expand(sizes).reshape(tuple(shape)).to(dtype) for t in (m.mean, scale))
    return Dense(mean, exists), Dense(scale, exists)


# --------------------------------------------------------------------------------------------- over the last dimensions


def last_dims(op: OpOverload, x: Dense, shape: Sequence[int], *parameters: Dense | None) -> tuple[int, ...]:
    """The dimensions of a `normalized_shape`. Shapes that do not match raise torch's own error."""
    first = x.ndim - len(shape)
    sizes = [tuple(x.shape[max(first, 0) :]), *(tuple(p.shape) for p in parameters if p is not None)]
    if first < 0 or not shape or any(size != tuple(shape) for size in sizes):
        arguments = (*(detached_data(p) for p in parameters), 1e-5)
        op(x.data, shape, *arguments)
    return tuple(range(first, x.ndim))


def has_whole_rows(x: Dense, dims: tuple[int, ...], eps: float | None, *parameters: Dense | None) -> bool:
    """Whether torch's own kernel is the rule: each row is valid as a whole or not at all, and a row of 0 stays finite.

    The kernel's derivative with respect to a parameter sums over all rows: 0 · NaN of an invalid row would show.
    """
    return has_whole_slices(x, dims) and all_valid(*parameters) and (eps is None or eps > 0)


@masked_slices(
    aten.layer_norm, aten.native_layer_norm, category=NORMALIZATION, dims=LastDims("normalized_shape", statistics=2)
)
def layer_norm(
    op: OpOverload,
    x: Dense,
    normalized_shape: Sequence[int],
    weight: Dense | None = None,
    bias: Dense | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Dense | tuple[Dense, Dense, Dense]:
    """Standardised over the last dimensions, scaled and shifted element by element."""
    dims = last_dims(op, x, normalized_shape, weight, bias)
    if has_whole_rows(x, dims, eps, weight, bias):
        affine_data = (plain_data(weight), plain_data(bias))
        result = op(x.filled(0), normalized_shape, *affine_data, eps)
        return x.like(zeroed(result, x.validity)) if isinstance(result, Tensor) else results_like(result, x.validity)

    def one_slice() -> Any:
        row = x.data.new_zeros(tuple(normalized_shape))
        return aten.layer_norm(row, normalized_shape, detached_data(weight), detached_data(bias), eps)

    dtype = result_dtype(x, (weight, bias), one_slice)
    values, m, scale = standardised(x, DenseSlices(dims), eps)
    result = Dense(affine(values, weight, bias).to(dtype), valid_in_all(x, weight, bias))
    if op is aten.layer_norm.default:
        return result
    return (result, *saved_statistics(x, (weight, bias), m, scale, m.mean.shape))


@masked_slices(
    aten.rms_norm, aten._fused_rms_norm, category=NORMALIZATION, dims=LastDims("normalized_shape", statistics=1)
)
def rms_norm(
    op: OpOverload,
    x: Dense,
    normalized_shape: Sequence[int],
    weight: Dense | None = None,
    eps: float | None = None,
) -> Dense | tuple[Dense, Dense]:
    """Divided by the root mean square of the valid elements."""
    dims = last_dims(op, x, normalized_shape, weight)
    if has_whole_rows(x, dims, eps, weight):
        return results_like(op(x.filled(0), normalized_shape, plain_data(weight), eps), x.validity)

    def one_slice() -> Any:
        row = x.data.new_zeros(tuple(normalized_shape))
        return aten.rms_norm(row, normalized_shape, detached_data(weight), eps)

    dtype = result_dtype(x, (weight,), one_slice)
    x = with_validity(x)
    values = x.filled(0).to(accumulation_dtype(x.dtype))
    count = x.count(dims, keepdim=True)
    assert isinstance(count, Tensor)
    exists = as_int8(count > 0)
    mean_square = values.square().sum(dims, keepdim=True) / nonzero_count(count)
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    scale = torch.where(count == 0, 1, mean_square + eps).rsqrt()
    normalised = Dense(values * scale, x.validity).filled(0)
    result = Dense(affine(normalised, weight, None).to(dtype), valid_in_all(x, weight))
    return result if op is aten.rms_norm.default else (result, Dense(scale, exists))


# --------------------------------------------------------------------------------------------------- groups of channels


@masked_slices(aten.group_norm, category=NORMALIZATION)
def group_norm(
    op: OpOverload,
    x: Dense,
    num_groups: int,
    weight: Dense | None = None,
    bias: Dense | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Dense:
    """Standardised over each group of channels, scaled and shifted by channel."""
    parameters = [p for p in (weight, bias) if p is not None]
    if x.ndim < 2 or num_groups < 1 or x.shape[1] % num_groups or any(p.shape != x.shape[1:2] for p in parameters):
        op(x.data, num_groups, detached_data(weight), detached_data(bias), eps)  # raises torch's error

    def one_slice() -> Any:
        row = x.data.new_zeros((1, x.shape[1], 1))
        return aten.group_norm(row, num_groups, detached_data(weight), detached_data(bias), eps)

    dtype = result_dtype(x, (weight, bias), one_slice)
    return grouped(x, weight, bias, num_groups, eps, dtype)[0]


@masked_rule(aten.native_group_norm, category=NORMALIZATION)
def native_group_norm(
    x: Dense,
    weight: Dense | None,
    bias: Dense | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Dense, Dense, Dense]:
    """group_norm with each group's statistics, which are differentiable, unlike those of layer_norm."""
    if x.data.numel() == 0 or not any_masked((x, weight, bias)):
        result, mean, rstd = aten.native_group_norm(x.data, plain_data(weight), plain_data(bias), N, C, HxW, group, eps)
        return Dense(result), Dense(mean), Dense(rstd)
    result, m, scale = grouped(x, weight, bias, group, eps, x.dtype)
    return (result, *statistics(x, (weight, bias), m, scale, (N, group)))


def grouped(
    x: Dense, weight: Dense | None, bias: Dense | None, groups: int, eps: float | Tensor, dtype: torch.dtype
) -> tuple[Dense, Moments, Tensor]:
    """The result of group_norm, and the moments and scale of each group, of shape (N, groups, 1, …)."""
    shape = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    validity = aligned_validity(with_validity(x))
    assert validity is not None
    split = Dense(x.data.reshape(shape), reshape_validity(validity, x.shape, shape))
    values, m, scale = standardised(split, DenseSlices(tuple(range(2, split.ndim))), eps)
    channels = (-1,) + (1,) * (x.ndim - 2)
    weight, bias = shaped(weight, channels), shaped(bias, channels)
    result = affine(values.reshape(x.shape), weight, bias).to(dtype)
    return Dense(result, valid_in_all(x, weight, bias)), m, scale


# ------------------------------------------------------------------------------------------------------ norms of slices


@masked_slices(aten.renorm, category=NORMALIZATION)
def renorm(op: OpOverload, x: Dense, p: float, dim: int, maxnorm: float) -> Dense:
    """Invalid elements contribute 0 to the norm of their slice."""
    return x.like(op(x.filled(0), p, dim, maxnorm))


@masked_slices(aten._weight_norm_interface, category=NORMALIZATION)
def _weight_norm_interface(op: OpOverload, v: Dense, g: Dense, dim: int = 0) -> tuple[Dense, Dense]:
    """`v` scaled so that in each slice along `dim` the norm of the valid elements is `g`; and the original norms."""
    v = with_validity(v)
    others = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    filled = Dense(v.filled(0).to(accumulation_dtype(v.dtype)), v.validity)
    norm = by_rule(aten.linalg_vector_norm.default, filled, 2, others, True)
    validity = valid_in_all(v, g)
    return Dense((filled.data * (g.filled(1) / norm.filled(1))).to(v.dtype), validity), norm
