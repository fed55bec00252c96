"""Normalisation: layer_norm, rms_norm, renorm, weight_norm (of channels: channels.py, batch_norms.py).

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
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.authoring import (
    NORMALIZATION,
    Dense,
    Unknown,
    accumulation_dtype,
    being_traced,
    by_rule,
    gradients_may_flow,
    masked_slices,
    over_slices,
    valid_in_all,
)
from op_registry.autocast import result_dtype
from op_registry.dimensions.slices import LastDims
from op_registry.records.fill import fill_in_place
from op_registry.records.slices import Moments, Over, moments, nonzero_count

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------- shared helpers


def with_validity(x: Dense) -> Dense:
    """The record with a validity tensor, a broadcast 1 if it had none, so that rules need no second case."""
    return x if x.validity is not None else Dense(x.data, x.data.new_ones((1,) * x.ndim, dtype=torch.int8))


def standardised(x: Dense, over: Over, eps: float | Tensor) -> tuple[Tensor, Moments, Tensor]:
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


def affine(values: Tensor, weight: Dense | None, bias: Dense | None) -> Tensor:
    """`values` scaled and shifted by parameters that broadcast with them."""
    if weight is not None:
        values = values * weight.filled(1)
    return values if bias is None else values + bias.filled(0)


def saved_statistics(parameters: Sequence[Dense | None], x: Dense, m: Moments, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale of each slice as most of torch's native operators return them: the parameters' dtype, detached."""
    dtype = next((p.dtype for p in parameters if p is not None), x.dtype)
    return m.mean.detach().to(dtype), scale.detach().to(dtype)


# --------------------------------------------------------------------------------------------- over the last dimensions


def dtype_of_norm(norm: OpOverloadPacket, x: Dense, *parameters: Dense | None) -> torch.dtype:
    """The dtype in which torch returns a norm over the last dimensions; torch's error for one that it refuses."""

    def one_slice() -> Any:
        return norm(x.data.new_zeros(2), [2], *(None if p is None else p.data.new_zeros(2) for p in parameters))

    return result_dtype(x, parameters, one_slice)


@over_slices(
    aten.layer_norm, aten.native_layer_norm, category=NORMALIZATION, dims=LastDims("normalized_shape", statistics=2)
)
def layer_norm(
    op: OpOverload,
    over: Over,
    x: Dense,
    weight: Dense | None = None,
    bias: Dense | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Standardised over the last dimensions, scaled and shifted element by element."""
    dtype = dtype_of_norm(aten.layer_norm, x, weight, bias)
    values, m, scale = standardised(x, over, eps)
    result = affine(values, weight, bias).to(dtype)
    return result if op is aten.layer_norm.default else (result, *saved_statistics((weight, bias), x, m, scale))


@over_slices(
    aten.rms_norm, aten._fused_rms_norm, category=NORMALIZATION, dims=LastDims("normalized_shape", statistics=1)
)
def rms_norm(
    op: OpOverload, over: Over, x: Dense, weight: Dense | None = None, eps: float | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Divided by the root mean square of the valid elements."""
    dtype = dtype_of_norm(aten.rms_norm, x, weight)
    x = with_validity(x)
    values, count = x.filled(0).to(accumulation_dtype(x.dtype)), over.count(x)
    mean_square = over.sum(values.square()) / nonzero_count(count)
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    scale = torch.where(count == 0, 1, mean_square + eps).rsqrt()
    normalised = Dense(values * over.broadcast_to_elements(scale), x.validity).filled(0)
    result = affine(normalised, weight, None).to(dtype)
    return result if op is aten.rms_norm.default else (result, scale)


# ------------------------------------------------------------------------------------------------------ norms of slices


_BUT_DIM = Unknown("it works on all dimensions but `dim`")


@masked_slices(aten.renorm, category=NORMALIZATION, dims=_BUT_DIM)
def renorm(op: OpOverload, x: Dense, p: float, dim: int, maxnorm: float) -> Dense:
    """Invalid elements contribute 0 to the norm of their slice."""
    return x.like(op(x.filled(0), p, dim, maxnorm))


@masked_slices(aten._weight_norm_interface, category=NORMALIZATION, dims=_BUT_DIM)
def _weight_norm_interface(op: OpOverload, v: Dense, g: Dense, dim: int = 0) -> tuple[Dense, Dense]:
    """`v` scaled so that in each slice along `dim` the norm of the valid elements is `g`; and the original norms."""
    v = with_validity(v)
    others = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    filled = Dense(v.filled(0).to(accumulation_dtype(v.dtype)), v.validity)
    norm = by_rule(aten.linalg_vector_norm.default, filled, 2, others, True)
    validity = valid_in_all(v, g)
    return Dense((filled.data * (g.filled(1) / norm.filled(1))).to(v.dtype), validity), norm
