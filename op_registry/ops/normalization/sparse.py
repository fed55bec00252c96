"""Norms with parameters on sparse storage: layer_norm, rms_norm, group_norm, batch_norm, instance_norm, renorm.

Law: that of norms.py and batch_norms.py, with statistics over the valid stored elements. Moments are segment reductions
(op_registry/sparse/segments.py); scales and shifts are gathered at the coordinates of the stored elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COO,
    Dense,
    Moments,
    NotLowered,
    Segments,
    Sparse,
    Spread,
    accumulation_dtype,
    align_to,
    autocast_on,
    call,
    dense_or_none,
    detached_data,
    few_of,
    nonzero_count,
    result_dtype,
    to_dense,
    to_layout,
    unique_keys,
    valid_in_all,
    with_coordinates,
)
from op_registry.ops.normalization import batch_norms, norms
from op_registry.ops.normalization.batch_norms import updated_statistics, write
from op_registry.ops.normalization.norms import affine, saved_statistics, shaped, standardised, with_validity

aten = torch.ops.aten

# --------------------------------------------------------------------------------------------- over the last dimensions


def last_slices(x: Dense | Sparse, normalized_shape: Sequence[int]) -> tuple[Sparse, Segments]:
    """The sparse record, and its slices over the dimensions of `normalized_shape`."""
    if not isinstance(x, Sparse):
        raise NotLowered("its input is stored densely")
    first = x.ndim - len(normalized_shape)
    if first < 0 or not normalized_shape or tuple(x.shape[first:]) != tuple(normalized_shape) or 0 in x.shape:
        raise NotLowered("the shapes do not match, or it is empty")
    sparse = x.pattern.ndim
    if first >= sparse:
        raise NotLowered("the slices are rows of values, on which the rule itself runs, with torch's kernel")
    return x, Segments(x, range(first, sparse), [d - sparse + 1 for d in range(max(first, sparse), x.ndim)])


def parameter_at(parameter: Dense | Sparse | None, x: Sparse) -> Dense | None:
    """A scale or shift for each stored element."""
    if parameter is None or (isinstance(parameter, Dense) and parameter.ndim <= len(x.dense_sizes)):
        return parameter
    gathered = align_to(parameter, x).map(lambda t: t.expand(x.values.shape))
    return Sparse(gathered, x.pattern).flat


def normalised(
    x: Sparse, over: Segments, parameters: tuple[Dense | None, Dense | None], eps: float, dtype: torch.dtype
) -> tuple[Sparse, Moments, Tensor]:
    """`x` standardised over its slices, scaled and shifted by a parameter per element; the moments; the scales."""
    weight, bias = parameters
    values, m, scale = standardised(x.flat, over, eps)
    result = Dense(affine(values, weight, bias).to(dtype), valid_in_all(x.flat, weight, bias))
    return x.folded(result), m, scale


def rms_norm(
    op: OpOverload,
    x: Dense | Sparse,
    normalized_shape: Sequence[int],
    weight: Dense | Sparse | None = None,
    eps: float | None = None,
) -> Sparse:
    x, over = last_slices(x, normalized_shape)
    if op is not aten.rms_norm.default or not x.dtype.is_floating_point:
        raise NotLowered("it also returns the scales, or torch refuses the dtype")
    flat, w = with_validity(x.flat), parameter_at(weight, x)

    def one_slice() -> Any:
        row = flat.data.new_zeros(tuple(normalized_shape))
        return aten.rms_norm(row, normalized_shape, detached_data(dense_or_none(weight)), eps)

    dtype = result_dtype(flat, (w,), one_slice)
    values = flat.filled(0).to(accumulation_dtype(x.dtype))
    count = over.count(flat)
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    scale = torch.where(count == 0, 1, over.sum(values.square()) / nonzero_count(count) + eps).rsqrt()
    normalised = Dense(values * over.broadcast_to_elements(scale), flat.validity).filled(0)
    return x.folded(Dense(affine(normalised, w, None).to(dtype), valid_in_all(x.flat, w)))


def layer_norm(
    op: OpOverload,
    x: Dense | Sparse,
    normalized_shape: Sequence[int],
    weight: Dense | Sparse | None = None,
    bias: Dense | Sparse | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    x, over = last_slices(x, normalized_shape)
    if op is aten.native_layer_norm.default and x.dense_sizes:
        raise NotLowered("it also returns the statistics, and some of their dimensions are dense")
    flat, w, b = x.flat, parameter_at(weight, x), parameter_at(bias, x)

    def one_slice() -> Any:
        row = flat.data.new_zeros(tuple(normalized_shape))
        parameters = (detached_data(dense_or_none(p)) for p in (weight, bias))
        return aten.layer_norm(row, normalized_shape, *parameters, eps)

    dtype = result_dtype(flat, (w, b), one_slice)
    result, m, scale = normalised(x, over, (w, b), eps, dtype)
    if op is aten.layer_norm.default:
        return result
    shape = [*x.shape[: x.ndim - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return (result, *saved_statistics(flat, (weight, bias), m, scale, shape))


# ----------------------------------------------------------------------------------------------------------- group_norm


def by_channel(parameter: Dense | None, x: Sparse) -> Dense | None:
    """For each stored element the parameter of its channel."""
    return None if parameter is None else parameter_at(shaped(parameter, (-1,) + (1,) * (x.ndim - 2)), x)


def with_sparse_channels(x: Dense | Sparse) -> Sparse:
    """The record, if its dimension of channels is sparse; NotLowered otherwise."""
    if not isinstance(x, Sparse) or x.ndim < 2 or x.pattern.ndim < 2 or 0 in x.shape or not x.dtype.is_floating_point:
        raise NotLowered("its channels are dense, or it is empty, or torch refuses the dtype")
    if autocast_on(x.device):
        raise NotLowered("autocast chooses another dtype")
    return x


def channel_parameter(parameter: Dense | Sparse | None, x: Sparse) -> Dense | None:
    """A parameter of `x`, if it is dense, with one value per channel and of the same dtype; NotLowered otherwise."""
    if parameter is None:
        return None
    if not isinstance(parameter, Dense) or parameter.shape != x.shape[1:2] or parameter.dtype is not x.dtype:
        raise NotLowered("a parameter is sparse, or of another shape or dtype")
    return parameter


@norms.group_norm.lowering(Sparse)
def group_norm(
    op: OpOverload,
    x: Dense | Sparse,
    num_groups: int,
    weight: Dense | Sparse | None = None,
    bias: Dense | Sparse | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    return _grouped(x, weight, bias, num_groups, eps)[0]


@norms.native_group_norm.lowering(Sparse)
def native_group_norm(
    op: OpOverload,
    x: Dense | Sparse,
    weight: Dense | Sparse | None,
    bias: Dense | Sparse | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Any:
    result, m, scale = _grouped(x, weight, bias, group, eps)
    return (result, *norms.statistics(x, (weight, bias), m, scale, (N, group)))


def _grouped(
    x: Dense | Sparse, weight: Dense | Sparse | None, bias: Dense | Sparse | None, groups: int, eps: float
) -> tuple[Sparse, Moments, Tensor]:
    x = with_sparse_channels(x)
    w, b = (channel_parameter(dense_or_none(p), x) for p in (weight, bias))
    if groups < 1 or x.shape[1] % groups:
        raise NotLowered("torch refuses the number of groups")
    coo = to_layout(x, COO)
    split = call(aten.view.default, coo, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    sparse = split.pattern.ndim
    over = Segments(split, range(2, sparse), [d - sparse + 1 for d in range(sparse, split.ndim)])
    result, m, scale = normalised(coo, over, (by_channel(w, coo), by_channel(b, coo)), eps, x.dtype)
    return to_layout(result, x.pattern.layout.exact_sibling), m, scale


# --------------------------------------------------------------------------------------------------- running statistics


def _by_own_statistics(
    x: Sparse, weight: Dense | None, bias: Dense | None, dims: Sequence[int], eps: float
) -> tuple[Sparse, Moments, Tensor]:
    sparse = x.pattern.ndim
    if not dims:
        raise NotLowered("its statistics run over dense dimensions only")
    over = Segments(x, dims, range(1, x.ndim - sparse + 1))
    return normalised(x, over, (by_channel(weight, x), by_channel(bias, x)), eps, x.dtype)


def _by_given_statistics(
    x: Sparse, weight: Dense | None, bias: Dense | None, mean: Dense | None, var: Dense | None, eps: float
) -> Sparse:
    if mean is None or var is None:
        raise NotLowered("torch refuses it without statistics")
    flat = x.flat
    w, b, m, v = (by_channel(p, x) for p in (weight, bias, mean, var))
    assert m is not None
    assert v is not None
    wide = accumulation_dtype(x.dtype)
    scale = (v.filled(1).to(wide) + eps).rsqrt()
    values = (flat.filled(0).to(wide) - m.filled(0).to(wide)) * scale
    return x.folded(Dense(affine(values, w, b).to(x.dtype), valid_in_all(flat, w, b, m, v)))


def _normalised(
    x: Dense | Sparse,
    dims: Sequence[int],
    parameters: Sequence[Dense | Sparse | None],
    own: bool,
    momentum: float,
    eps: float,
) -> tuple[Sparse, Moments | None, Tensor | None]:
    """By its own statistics over `dims`, which update the running ones, or by the running ones."""
    x = with_sparse_channels(x)
    weight, bias = (channel_parameter(dense_or_none(p), x) for p in parameters[:2])
    mean, var = (channel_parameter(p, x) for p in parameters[2:])
    if any(p is not None and p.data.requires_grad for p in (mean, var)):
        raise NotLowered("torch refuses running statistics that require grad")
    if not own:
        return _by_given_statistics(x, weight, bias, mean, var, eps), None, None
    result, m, scale = _by_own_statistics(x, weight, bias, dims, eps)
    by_row = Spread(*(t.reshape(-1, x.shape[1]) for t in (m.count, m.average, m.square)))
    for running, values in zip((mean, var), updated_statistics(mean, var, by_row, momentum), strict=True):
        write(running, values)
    return result, m, scale


@batch_norms.batch_norm.lowering(Sparse)
def batch_norm(
    op: OpOverload,
    x: Dense | Sparse,
    weight: Dense | Sparse | None,
    bias: Dense | Sparse | None,
    running_mean: Dense | Sparse | None,
    running_var: Dense | Sparse | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    dims = _sparse_dims_but_channels(x)
    return _normalised(x, dims, (weight, bias, running_mean, running_var), training, momentum, eps)[0]


def _sparse_dims_but_channels(x: Dense | Sparse) -> list[int]:
    return [d for d in range(x.pattern.ndim) if d != 1] if isinstance(x, Sparse) else []


@batch_norms.native_batch_norm.lowering(Sparse)
def native_batch_norm(
    op: OpOverload,
    x: Dense | Sparse,
    weight: Dense | Sparse | None,
    bias: Dense | Sparse | None,
    running_mean: Dense | Sparse | None,
    running_var: Dense | Sparse | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or op is aten._native_batch_norm_legit_functional.default:
        raise NotLowered("it uses the running statistics or returns them")
    parameters = (weight, bias, running_mean, running_var)
    result, m, scale = _normalised(x, _sparse_dims_but_channels(x), parameters, True, momentum, eps)
    assert m is not None
    assert scale is not None
    return (result, *saved_statistics(x, parameters, m, scale, (-1,)))


@batch_norms.batch_norm_with_update.lowering(Sparse)
def batch_norm_with_update(
    op: OpOverload,
    x: Dense | Sparse,
    weight: Dense | Sparse | None,
    bias: Dense | Sparse | None,
    running_mean: Dense | Sparse | None,
    running_var: Dense | Sparse | None,
    momentum: float,
    eps: float,
) -> Any:
    if op is not aten._batch_norm_with_update.default:
        raise NotLowered("it returns the running statistics")
    native = aten._native_batch_norm_legit.default
    result = native_batch_norm(native, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*result, result[0].values.data.new_empty(0, dtype=torch.uint8))


@batch_norms.instance_norm.lowering(Sparse)
def instance_norm(
    op: OpOverload,
    x: Dense | Sparse,
    weight: Dense | Sparse | None,
    bias: Dense | Sparse | None,
    running_mean: Dense | Sparse | None,
    running_var: Dense | Sparse | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    dims = list(range(2, x.pattern.ndim)) if isinstance(x, Sparse) else []
    return _normalised(x, dims, (weight, bias, running_mean, running_var), use_input_stats, momentum, eps)[0]


# ------------------------------------------------------------------------------------------------------ norms of slices


@norms.renorm.lowering(Sparse)
def renorm(op: OpOverload, x: Dense | Sparse, p: float, dim: int, maxnorm: float) -> Any:
    op(torch.empty([1] * x.ndim, dtype=x.dtype, device="meta"), p, dim, maxnorm)  # raises torch's errors
    if x.ndim < 2 or 0 in x.shape:
        raise NotLowered("it has one dimension, or is empty")
    dim = dim % x.ndim
    if isinstance(x, Sparse) and x.pattern.layout is COO and dim < x.pattern.ndim and few_of(x.shape[dim], x.pattern):
        slices, position = unique_keys(x.pattern.coordinates()[dim], x.shape[dim])
        own = [position if d == dim else c for d, c in enumerate(x.pattern.coordinates())]
        sizes = [len(slices) if d == dim else n for d, n in enumerate(x.pattern.sizes)]
        return x.like(call(op, with_coordinates(x, own, x.values, sizes), p, dim, maxnorm).values)
    norm = to_dense(call(aten.linalg_vector_norm.default, x, p, [d for d in range(x.ndim) if d != dim])).filled(0)
    factor = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1).to(x.dtype.to_real())
    factor = factor.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return call(aten.mul.Tensor, x, Dense(factor))
