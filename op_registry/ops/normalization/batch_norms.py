"""batch_norm and instance_norm: statistics by channel, and running ones that outlive the call.

Law: statistics over the valid elements; valid where the input is, and the channel's parameters are.

Running statistics move by what is valid alone: a channel's mean stays as it was where n = 0, and its variance where
n = 1, which has none. One that is itself masked is updated in place like any other tensor: where invalid it stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import NORMALIZATION, Dense, DenseSlices, Moments, masked_slices, result_dtype, valid_in_all
from op_registry.ops.normalization.norms import affine, saved_statistics, shaped, standardised

aten = torch.ops.aten

# -------------------------------------------------------------------------------------------------- what they share


def channel_shape(x: Dense) -> tuple[int, ...]:
    """The shape in which a parameter of each channel broadcasts with the input."""
    return (1, -1) + (1,) * (x.ndim - 2)


def check(op: OpOverload, x: Dense, parameters: Sequence[Dense | None], arguments: Sequence[Any]) -> None:
    """Shapes that don't fit, and running statistics that require grad, raise torch's own error.

    The statistics are lent as copies, so that nothing is written.
    """
    fits = x.ndim >= 2 and all(p is None or p.shape == x.shape[1:2] for p in parameters)
    if not fits or any(p is not None and p.data.requires_grad for p in parameters[2:]):
        op(x.data, *(None if p is None else p.data.clone() for p in parameters), *arguments)


def by_own_statistics(
    x: Dense, weight: Dense | None, bias: Dense | None, dims: tuple[int, ...], eps: float
) -> tuple[Dense, Moments, Tensor]:
    """Standardised over `dims`, scaled and shifted by channel; the moments, and one by the deviation."""

    def one_slice() -> Any:
        ends = [None if p is None else p.data.detach()[:1] for p in (weight, bias)]
        return aten.batch_norm(x.data.new_zeros((2, 1)), *ends, None, None, True, 0.0, 1.0, False)

    dtype = result_dtype(x, (weight, bias), one_slice)
    values, m, scale = standardised(x, DenseSlices(dims), eps)
    weight, bias = shaped(weight, channel_shape(x)), shaped(bias, channel_shape(x))
    return Dense(affine(values, weight, bias).to(dtype), valid_in_all(x, weight, bias)), m, scale


def by_given_statistics(op: OpOverload, x: Dense, parameters: Sequence[Dense | None], arguments: Sequence[Any]) -> Any:
    """The operator with given mean and variance: element by element in the input."""
    neutral = (1, 0, 0, 1)  # weight, bias, mean, variance
    filled = [None if p is None else p.filled(value) for p, value in zip(parameters, neutral, strict=True)]
    result = op(x.filled(0), *filled, *arguments)
    validity = valid_in_all(x, *(shaped(p, channel_shape(x)) for p in parameters))
    return Dense(result, validity) if isinstance(result, Tensor) else (Dense(result[0], validity), *result[1:])


def moved_on(mean: Dense | None, var: Dense | None, m: Moments, momentum: float) -> tuple[Tensor | None, Tensor | None]:
    """The running mean and variance after a batch with these moments, of shape (slices, channels, 1, …).

    With several slices to a channel (instance_norm) it is the mean over the slices that have the statistic.
    """
    channels = m.mean.shape[1]
    count = m.count.expand(m.mean.shape).reshape(-1, channels)

    def moved(record: Dense | None, statistic: Tensor, needed: int) -> Tensor | None:
        if record is None:
            return None
        has = count >= needed
        slices = has.sum(0)
        now = torch.where(has, statistic.detach().reshape(-1, channels), 0).sum(0) / slices.clamp(min=1)
        old = record.data.detach()
        new = torch.where(slices > 0, now.to(old.dtype) * momentum + old * (1 - momentum), old)
        return new if record.valid is None else torch.where(record.valid, new, old)

    return moved(mean, m.mean, 1), moved(var, m.square / (m.count - 1), 2)


def write(record: Dense | None, values: Tensor | None) -> None:
    """A running statistic is a buffer that the caller keeps: changed in place, outside autograd, as torch does."""
    if record is not None and values is not None:
        with torch.no_grad():
            record.data.copy_(values)


# ------------------------------------------------------------------------------------------------------- batch_norm


def over_batch(x: Dense) -> tuple[int, ...]:
    """Every dimension but the channels'."""
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
    """By channel: over the batch while training, by the running statistics otherwise."""
    parameters, arguments = (weight, bias, running_mean, running_var), (training, momentum, eps, cudnn_enabled)
    check(op, x, parameters, arguments)
    if not training:
        return by_given_statistics(op, x, parameters, arguments)
    result, m, _ = by_own_statistics(x, weight, bias, over_batch(x), eps)
    mean, var = moved_on(running_mean, running_var, m, momentum)
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
    """With the batch's statistics; the functional overload returns the running ones, the others write them."""
    parameters, arguments = (weight, bias, running_mean, running_var), (training, momentum, eps)
    check(op, x, parameters, arguments)
    if not training:
        return by_given_statistics(op, x, parameters, arguments)
    result, m, scale = by_own_statistics(x, weight, bias, over_batch(x), eps)
    mean, var = moved_on(running_mean, running_var, m, momentum)
    saved = (result, *saved_statistics(x, parameters, m, scale, (-1,)))
    if op is not aten._native_batch_norm_legit_functional.default:
        write(running_mean, mean)
        write(running_var, var)
        return saved
    after = [r.like(new) for r, new in ((running_mean, mean), (running_var, var)) if r is not None and new is not None]
    return (*saved, *after)


@masked_slices(aten._native_batch_norm_legit.no_stats, category=NORMALIZATION)
def native_batch_norm_without_running(
    op: OpOverload, x: Dense, weight: Dense | None, bias: Dense | None, training: bool, momentum: float, eps: float
) -> tuple[Dense, Dense, Dense]:
    """Always by the batch's own statistics."""
    check(op, x, (weight, bias), (training, momentum, eps))
    result, m, scale = by_own_statistics(x, weight, bias, over_batch(x), eps)
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
    """By the running statistics."""
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
    """As native_batch_norm while training, with an empty reserve."""
    functional = op is aten._batch_norm_with_update_functional.default
    native = aten._native_batch_norm_legit_functional if functional else aten._native_batch_norm_legit
    arguments = (x, weight, bias, running_mean, running_var, True, momentum, eps)
    results = native_batch_norm.bind(native.default)(*arguments)
    return (*results[:3], x.data.new_empty(0, dtype=torch.uint8), *results[3:])


# ---------------------------------------------------------------------------------------------------- instance_norm


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
    """By channel of each sample; running statistics are means over the samples that have something valid."""
    parameters = (weight, bias, running_mean, running_var)
    check(op, x, parameters, (use_input_stats, momentum, eps, cudnn_enabled))
    if not use_input_stats:
        return by_given_statistics(op, x, parameters, (use_input_stats, momentum, eps, cudnn_enabled))
    result, m, _ = by_own_statistics(x, weight, bias, tuple(range(2, x.ndim)), eps)
    mean, var = moved_on(running_mean, running_var, m, momentum)
    write(running_mean, mean)
    write(running_var, var)
    return result
