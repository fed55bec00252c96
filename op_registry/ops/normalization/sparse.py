"""Norms with parameters on sparse storage: layer_norm, rms_norm, group_norm, batch_norm, instance_norm, renorm.

Law: as norms.py and batch_norms.py have it: statistics over what is valid, which is among what is stored. Moments are
those of segments (segments.py); scales and shifts are read in the places of the stored elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    Moments,
    NotLowered,
    Segments,
    Sparse,
    accumulation_dtype,
    align_to,
    autocast_on,
    call,
    dense_or_none,
    detached_data,
    layout_without_blocks,
    nonzero_count,
    result_dtype,
    to_layout,
    valid_in_all,
)
from op_registry.ops.normalization import batch_norms, norms
from op_registry.ops.normalization.batch_norms import moved_on, write
from op_registry.ops.normalization.norms import affine, saved_statistics, shaped, standardised, with_validity

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------- over the last dimensions


def last_slices(x: Any, normalized_shape: Sequence[int]) -> Segments:
    """The slices that a normalized_shape names."""
    if not isinstance(x, Sparse):
        raise NotLowered("its input is stored densely")
    first = x.ndim - len(normalized_shape)
    if first < 0 or not normalized_shape or tuple(x.shape[first:]) != tuple(normalized_shape) or 0 in x.shape:
        raise NotLowered("the shapes don't fit, or there is nothing in it")
    sparse = x.pattern.ndim
    if first >= sparse:
        raise NotLowered("the slices are rows of values: the rule itself runs on those, by torch's kernel (packed.py)")
    return Segments(x, range(first, sparse), [d - sparse + 1 for d in range(max(first, sparse), x.ndim)])


def parameter_at(parameter: Any, x: Sparse) -> Any:
    """A scale or shift for each stored element."""
    if parameter is None or (isinstance(parameter, Dense) and parameter.ndim <= len(x.dense_sizes)):
        return parameter
    found = align_to(parameter, x).map(lambda t: t.expand(x.values.shape))
    return Sparse(found, x.pattern).flat


def rms_norm(
    op: OpOverload,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Sparse:
    over = last_slices(x, normalized_shape)
    if op is not aten.rms_norm.default or not x.dtype.is_floating_point:
        raise NotLowered("it gives the scales as well, or torch refuses its dtype")
    flat, w = with_validity(x.flat), parameter_at(weight, x)

    def one_slice() -> Any:
        return aten.rms_norm(flat.data.new_zeros(tuple(normalized_shape)), normalized_shape, detached_data(weight), eps)

    dtype = result_dtype(flat, (w,), one_slice)
    values = flat.filled(0).to(accumulation_dtype(x.dtype))
    count = over.count(flat)
    least = torch.finfo(values.dtype).eps if eps is None else eps
    scale = torch.where(count == 0, 1, over.sum(values.square()) / nonzero_count(count) + least).rsqrt()
    normalised = Dense(values * over.spread(scale), flat.validity).filled(0)
    return x.folded(Dense(affine(normalised, w, None).to(dtype), valid_in_all(x.flat, w)))


def layer_norm(
    op: OpOverload,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    over = last_slices(x, normalized_shape)
    if op is aten.native_layer_norm.default and x.dense_sizes:
        raise NotLowered("it gives the statistics as well, of which some are dense")
    flat, w, b = x.flat, parameter_at(weight, x), parameter_at(bias, x)

    def one_slice() -> Any:
        row = flat.data.new_zeros(tuple(normalized_shape))
        return aten.layer_norm(row, normalized_shape, detached_data(weight), detached_data(bias), eps)

    dtype = result_dtype(flat, (w, b), one_slice)
    values, m, scale = standardised(flat, over, eps)
    result = x.folded(Dense(affine(values, w, b).to(dtype), valid_in_all(flat, w, b)))
    if op is aten.layer_norm.default:
        return result
    shape = [*x.shape[: x.ndim - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return (result, *saved_statistics(flat, (weight, bias), m, scale, shape))


# ------------------------------------------------------------------------------------------------ groups of channels


def by_channel(parameter: Any, x: Sparse) -> Any:
    """The parameter of its channel for each stored element."""
    if parameter is None:
        return None
    if isinstance(parameter, Sparse):
        raise NotLowered("a parameter is sparse")
    return parameter_at(shaped(parameter, (-1,) + (1,) * (x.ndim - 2)), x)


def channels_fit(x: Any, *parameters: Any) -> None:
    if not isinstance(x, Sparse) or x.ndim < 2 or x.pattern.ndim < 2 or 0 in x.shape or not x.dtype.is_floating_point:
        raise NotLowered("its channels are dense, or there is nothing in it, or torch refuses its dtype")
    for p in parameters:
        if p is not None and (not isinstance(p, Dense) or p.shape != x.shape[1:2] or p.dtype is not x.dtype):
            raise NotLowered("a parameter is sparse, or of another shape or dtype")
    if autocast_on(x.device):
        raise NotLowered("autocast chooses another dtype")


@norms.group_norm.lowering(Sparse)
def group_norm(
    op: OpOverload,
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    return _grouped(x, weight, bias, num_groups, eps)[0]


@norms.native_group_norm.lowering(Sparse)
def native_group_norm(
    op: OpOverload, x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    result, m, scale = _grouped(x, weight, bias, group, eps)
    return (result, *saved_statistics(x.flat, (dense_or_none(weight), dense_or_none(bias)), m, scale, (N, group)))


def _grouped(x: Any, weight: Any, bias: Any, groups: int, eps: float) -> tuple[Sparse, Moments, Tensor]:
    weight, bias = dense_or_none(weight), dense_or_none(bias)  # a number for each channel
    channels_fit(x, weight, bias)
    if groups < 1 or x.shape[1] % groups:
        raise NotLowered("torch refuses the number of groups")
    lined = to_layout(x, torch.sparse_coo)
    split = call(aten.view.default, lined, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    sparse = split.pattern.ndim
    over = Segments(split, range(2, sparse), [d - sparse + 1 for d in range(sparse, split.ndim)])
    values, m, scale = standardised(split.flat, over, eps)
    w, b = by_channel(weight, lined), by_channel(bias, lined)
    result = lined.folded(Dense(affine(values, w, b).to(x.dtype), valid_in_all(lined.flat, w, b)))
    return to_layout(result, layout_without_blocks(x.pattern.layout)), m, scale


# ------------------------------------------------------------------------------------------------- batch and instance


def _by_own(x: Sparse, weight: Any, bias: Any, along: Sequence[int], eps: float) -> tuple[Sparse, Moments, Tensor]:
    sparse = x.pattern.ndim
    if not along:
        raise NotLowered("its statistics are of dense dimensions alone")
    over = Segments(x, along, range(1, x.ndim - sparse + 1))
    values, m, scale = standardised(x.flat, over, eps)
    w, b = by_channel(weight, x), by_channel(bias, x)
    return x.folded(Dense(affine(values, w, b).to(x.dtype), valid_in_all(x.flat, w, b))), m, scale


def _by_given(x: Sparse, weight: Any, bias: Any, mean: Any, var: Any, eps: float) -> Sparse:
    if mean is None or var is None:
        raise NotLowered("torch refuses it without statistics")
    flat = x.flat
    w, b, m, v = (by_channel(p, x) for p in (weight, bias, mean, var))
    wide = accumulation_dtype(x.dtype)
    scale = (v.filled(1).to(wide) + eps).rsqrt()
    values = (flat.filled(0).to(wide) - m.filled(0).to(wide)) * scale
    return x.folded(Dense(affine(values, w, b).to(x.dtype), valid_in_all(flat, w, b, m, v)))


def _with_statistics(
    x: Any, along: Sequence[int], parameters: Sequence[Any], own: bool, momentum: float, eps: float
) -> tuple[Sparse, Moments | None, Tensor | None]:
    weight, bias = dense_or_none(parameters[0]), dense_or_none(parameters[1])  # a number for each channel
    mean, var = parameters[2:]
    channels_fit(x, weight, bias, mean, var)
    if any(p is not None and p.data.requires_grad for p in (mean, var)):
        raise NotLowered("torch refuses running statistics that require grad")
    if not own:
        return _by_given(x, weight, bias, mean, var, eps), None, None
    result, m, scale = _by_own(x, weight, bias, along, eps)
    rows = Moments(*(t.reshape(-1, x.shape[1]) for t in (m.count, m.mean, m.mean, m.mean, m.square)))
    for record, values in zip((mean, var), moved_on(mean, var, rows, momentum), strict=True):
        write(record, values)
    return result, m, scale


@batch_norms.batch_norm.lowering(Sparse)
def batch_norm(
    op: OpOverload,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    along = _over_batch(x)
    return _with_statistics(x, along, (weight, bias, running_mean, running_var), training, momentum, eps)[0]


def _over_batch(x: Any) -> list[int]:
    return [d for d in range(x.pattern.ndim) if d != 1] if isinstance(x, Sparse) else []


@batch_norms.native_batch_norm.lowering(Sparse)
def native_batch_norm(
    op: OpOverload,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or op is aten._native_batch_norm_legit_functional.default:
        raise NotLowered("it uses the running statistics, or returns them")
    parameters = (weight, bias, running_mean, running_var)
    result, m, scale = _with_statistics(x, _over_batch(x), parameters, True, momentum, eps)
    assert m is not None
    assert scale is not None
    return (result, *saved_statistics(x.flat, [dense_or_none(p) for p in parameters], m, scale, (-1,)))


@batch_norms.batch_norm_with_update.lowering(Sparse)
def batch_norm_with_update(
    op: OpOverload,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> Any:
    if op is not aten._batch_norm_with_update.default:
        raise NotLowered("it returns the running statistics")
    native = aten._native_batch_norm_legit.default
    result = native_batch_norm(native, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*result, x.values.data.new_empty(0, dtype=torch.uint8))


@batch_norms.instance_norm.lowering(Sparse)
def instance_norm(
    op: OpOverload,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    along = list(range(2, x.pattern.ndim)) if isinstance(x, Sparse) else []
    return _with_statistics(x, along, (weight, bias, running_mean, running_var), use_input_stats, momentum, eps)[0]


# ----------------------------------------------------------------------------------------------------- norms of slices


@norms.renorm.lowering(Sparse)
def renorm(op: OpOverload, x: Any, p: float, dim: int, maxnorm: float) -> Any:
    op(torch.empty(x.shape, dtype=x.dtype, device="meta"), p, dim, maxnorm)  # raises torch's errors
    if x.ndim < 2 or 0 in x.shape:
        raise NotLowered("there is one dimension, or nothing in it")
    at = dim % x.ndim
    norm = dense_or_none(call(aten.linalg_vector_norm.default, x, p, [d for d in range(x.ndim) if d != at])).filled(0)
    factor = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1).to(x.dtype.to_real())
    factor = factor.reshape([-1 if d == at else 1 for d in range(x.ndim)])
    return call(aten.mul.Tensor, x, Dense(factor))
