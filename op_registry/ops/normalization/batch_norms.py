"""batch_norm and instance_norm: statistics by channel, and running statistics.

Law: statistics over the valid elements; valid where the input and the channel's parameters are.

Running statistics are updated from valid elements only. With n valid elements in a channel, its running mean does not
change if n = 0, and its running variance does not if n ≤ 1 (one element has no variance). A masked running statistic is
updated in place like any other tensor: invalid elements stay invalid.
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
    Moments,
    Spread,
    masked_slices,
    result_dtype,
    valid_in_all,
)
from op_registry.ops.normalization.norms import affine, saved_statistics, shaped, standardised

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------- shared helpers


def channel_shape(x: Dense) -> tuple[int, ...]:
    """The shape in which a per-channel parameter broadcasts with the input."""
    return (1, -1) + (1,) * (x.ndim - 2)


def check_arguments(op: OpOverload, x: Dense, parameters: Sequence[Dense | None], arguments: Sequence[Any]) -> None:
    """Shapes that do not match, and running statistics that require grad, raise torch's own error.

    torch gets copies of the statistics, so that nothing is written.
    """
    shapes_match = x.ndim >= 2 and all(p is None or p.shape == x.shape[1:2] for p in parameters)
    if not shapes_match or any(p is not None and p.data.requires_grad for p in parameters[2:]):
        op(x.data, *(None if p is None else p.data.clone() for p in parameters), *arguments)


def by_own_statistics(
    x: Dense, weight: Dense | None, bias: Dense | None, dims: tuple[int, ...], eps: float
) -> tuple[Dense, Moments, Tensor]:
    """The input standardised over `dims`, scaled and shifted by channel; the moments; 1 / the standard deviation."""

    def one_slice() -> Any:
        first_channel = [None if p is None else p.data.detach()[:1] for p in (weight, bias)]
        return aten.batch_norm(x.data.new_zeros((2, 1)), *first_channel, None, None, True, 0.0, 1.0, False)

    dtype = result_dtype(x, (weight, bias), one_slice)
    values, m, scale = standardised(x, DenseSlices(dims), eps)
    weight, bias = shaped(weight, channel_shape(x)), shaped(bias, channel_shape(x))
    return Dense(affine(values, weight, bias).to(dtype), valid_in_all(x, weight, bias)), m, scale


def by_given_statistics(op: OpOverload, x: Dense, parameters: Sequence[Dense | None], arguments: Sequence[Any]) -> Any:
    """The operator with a given mean and variance, which is elementwise in the input."""
    fills = (1, 0, 0, 1)  # weight, bias, mean, variance
    filled = [None if p is None else p.filled(fill) for p, fill in zip(parameters, fills, strict=True)]
    result = op(x.filled(0), *filled, *arguments)
    validity = valid_in_all(x, *(shaped(p, channel_shape(x)) for p in parameters))
    return Dense(result, validity) if isinstance(result, Tensor) else (Dense(result[0], validity), *result[1:])


def updated_statistics(
    mean: Dense | None, var: Dense | None, m: Spread, momentum: float
) -> tuple[Tensor | None, Tensor | None]:
    """The running mean and variance after a batch with these moments, of shape (slices, channels, 1, …).

    Where a channel has several slices (instance_norm), the update is the mean over the slices that have the statistic.
    """
    channels = m.mean.shape[1]
    count = m.count.expand(m.mean.shape).reshape(-1, channels)

    def updated(running: Dense | None, statistic: Tensor, needed: int) -> Tensor | None:
        if running is None:
            return None
        defined = count >= needed
        slices = defined.sum(0)
        of_batch = torch.where(defined, statistic.detach().reshape(-1, channels), 0).sum(0) / slices.clamp(min=1)
        old = running.data.detach()
        new = torch.where(slices > 0, of_batch.to(old.dtype) * momentum + old * (1 - momentum), old)
        return new if running.valid is None else torch.where(running.valid, new, old)

    return updated(mean, m.average, 1), updated(var, m.square / (m.count - 1), 2)


def write(running: Dense | None, values: Tensor | None) -> None:
    """Update a running statistic, the caller's buffer, in place and outside autograd, as torch does."""
    if running is not None and values is not None:
        with torch.no_grad():
            running.data.copy_(values)


# ----------------------------------------------------------------------------------------------------------- batch_norm


def dims_but_channels(x: Dense) -> tuple[int, ...]:
    """Every dimension except the channels."""
    return tuple(d for d in range(x.ndim) if d != 1)


@masked_slices(aten.batch_norm, category=NORMALIZATION)
def batch_norm(
    op: OpOverload,
    x: Dense,
    weight: Dense | None,
    bias: Dense | None,
    running_mean: Dense | None,
    running_var: Dense | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """By channel: with the batch's statistics while training, with the running ones otherwise."""
    parameters, arguments = (weight, bias, running_mean, running_var), (training, momentum, eps, cudnn_enabled)
    check_arguments(op, x, parameters, arguments)
    if not training:
        return by_given_statistics(op, x, parameters, arguments)
    result, m, _ = by_own_statistics(x, weight, bias, dims_but_channels(x), eps)
    mean, var = updated_statistics(running_mean, running_var, m, momentum)
    write(running_mean, mean)
    write(running_var, var)
    return result


@masked_slices(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
    category=NORMALIZATION,
)
def native_batch_norm(
    op: OpOverload,
    x: Dense,
    weight: Dense | None,
    bias: Dense | None,
    running_mean: Dense | None,
    running_var: Dense | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """As batch_norm, with saved statistics. The functional overload returns the running ones, the others write them."""
    parameters, arguments = (weight, bias, running_mean, running_var), (training, momentum, eps)
    check_arguments(op, x, parameters, arguments)
    if not training:
        return by_given_statistics(op, x, parameters, arguments)
    result, m, scale = by_own_statistics(x, weight, bias, dims_but_channels(x), eps)
    mean, var = updated_statistics(running_mean, running_var, m, momentum)
    saved = (result, *saved_statistics(x, parameters, m, scale, (-1,)))
    if op is not aten._native_batch_norm_legit_functional.default:
        write(running_mean, mean)
        write(running_var, var)
        return saved
    running = ((running_mean, mean), (running_var, var))
    return (*saved, *(old.like(new) for old, new in running if old is not None and new is not None))


@masked_slices(aten._native_batch_norm_legit.no_stats, category=NORMALIZATION)
def native_batch_norm_without_running(
    op: OpOverload, x: Dense, weight: Dense | None, bias: Dense | None, training: bool, momentum: float, eps: float
) -> tuple[Dense, Dense, Dense]:
    """Always with the batch's statistics."""
    check_arguments(op, x, (weight, bias), (training, momentum, eps))
    result, m, scale = by_own_statistics(x, weight, bias, dims_but_channels(x), eps)
    return (result, *saved_statistics(x, (weight, bias), m, scale, (-1,)))


@masked_slices(
    aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default, category=NORMALIZATION
)
def native_batch_norm_evaluated(
    op: OpOverload,
    x: Dense,
    weight: Dense | None,
    bias: Dense | None,
    running_mean: Dense | None,
    running_var: Dense | None,
    momentum: float,
    eps: float,
) -> Any:
    """With the running statistics."""
    return by_given_statistics(op, x, (weight, bias, running_mean, running_var), (momentum, eps))


@masked_slices(
    aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default, category=NORMALIZATION
)
def batch_norm_with_update(
    op: OpOverload,
    x: Dense,
    weight: Dense | None,
    bias: Dense | None,
    running_mean: Dense,
    running_var: Dense,
    momentum: float,
    eps: float,
) -> Any:
    """As native_batch_norm while training; the reserve is empty."""
    functional = op is aten._batch_norm_with_update_functional.default
    native = aten._native_batch_norm_legit_functional if functional else aten._native_batch_norm_legit
    arguments = (x, weight, bias, running_mean, running_var, True, momentum, eps)
    results = native_batch_norm.bind(native.default)(*arguments)
    return (*results[:3], x.data.new_empty(0, dtype=torch.uint8), *results[3:])


# -------------------------------------------------------------------------------------------------------- instance_norm


@masked_slices(aten.instance_norm, category=NORMALIZATION)
def instance_norm(
    op: OpOverload,
    x: Dense,
    weight: Dense | None,
    bias: Dense | None,
    running_mean: Dense | None,
    running_var: Dense | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """By channel of each sample; running statistics are means over the samples with enough valid elements."""
    parameters = (weight, bias, running_mean, running_var)
    check_arguments(op, x, parameters, (use_input_stats, momentum, eps, cudnn_enabled))
    if not use_input_stats:
        return by_given_statistics(op, x, parameters, (use_input_stats, momentum, eps, cudnn_enabled))
    result, m, _ = by_own_statistics(x, weight, bias, tuple(range(2, x.ndim)), eps)
    mean, var = updated_statistics(running_mean, running_var, m, momentum)
    write(running_mean, mean)
    write(running_var, var)
    return result
