"""Normalisations: mean and variance of each slice's valid elements, then the affine parameters, elementwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, oracle
from op_registry.conformance.oracles.engine import Group, groups, map_groups, reduce_groups, slices


def _wide(x: Expected) -> Expected:
    """Convert half precision to float32, as torch does to compute statistics."""
    return Expected(x.data.to(torch.float32), x.mask) if x.data.dtype in (torch.float16, torch.bfloat16) else x


def standardized(x: Expected, indices: Iterable[Tensor], eps: float, centred: bool = True) -> Tensor:
    """The elements of each slice (flat indices), minus its mean and divided by its standard deviation."""
    wide = _wide(x)

    def one(group: Group) -> Tensor:
        (values,) = group.values
        mean = values.mean() if centred else torch.zeros((), dtype=values.dtype)
        variance = ((values - mean) ** 2).mean()
        return (values - mean) / (variance + eps).sqrt()

    result: Expected = map_groups(groups([wide], indices), one, wide.data, wide.mask)
    return result.data


def statistics(x: Expected, indices: Iterable[Tensor], eps: float, plain: Sequence[Tensor]) -> Any:
    """Mean and reciprocal standard deviation of each slice, without derivatives, as in torch."""

    def one(group: Group) -> tuple[Tensor, Tensor]:
        (values,) = group.values
        return values.mean(), (((values - values.mean()) ** 2).mean() + eps).rsqrt()

    detached = Expected(_wide(x).data.detach(), x.mask)
    return reduce_groups(groups([detached], indices), one, [own.detach() for own in plain])


def affine(
    z: Tensor, mask: Tensor, weight: Expected | None, bias: Expected | None, shape: list[int], dtype: torch.dtype
) -> Expected:
    """Weight and bias, reshaped to broadcast, applied elementwise."""
    for parameter, name in ((weight, "weight"), (bias, "bias")):
        if parameter is None:
            continue
        data, known = parameter.data.reshape(shape), parameter.mask.reshape(shape)
        z = z * data if name == "weight" else z + data
        mask = mask & known.expand(z.shape)
    return Expected(z.to(dtype), mask)


@oracle("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(c: Call) -> Any:
    """Statistics over the valid elements of the trailing dimensions."""
    x, shape = c["input"], list(c["normalized_shape"])
    plain = c.plain()
    out = plain if isinstance(plain, Tensor) else plain[0]
    dims = range(x.ndim - len(shape), x.ndim)
    eps = c["eps"] if c["eps"] is not None else torch.finfo(x.data.dtype).eps
    z = standardized(x, slices(x.shape, dims), eps, centred="rms" not in c.name)
    result = affine(z, x.mask, c["weight"], c.get("bias"), shape, out.dtype)
    if c.name != "native_layer_norm":
        return result
    return result, *statistics(x, slices(x.shape, dims), eps, plain[1:])


@oracle("group_norm", "native_group_norm")
def group_norm(c: Call) -> Any:
    """Statistics over the valid elements of each group of channels."""
    x = c["input"]
    count = c.get("num_groups", c.get("group"))
    plain = c.plain()
    out = plain if isinstance(plain, Tensor) else plain[0]
    n, channels = x.shape[:2]
    each = list(torch.arange(x.data.numel()).reshape(n * count, -1)) if x.data.numel() else []
    z = standardized(x, each, c["eps"])
    result = affine(z, x.mask, c["weight"], c["bias"], [channels] + [1] * (x.ndim - 2), out.dtype)
    if isinstance(plain, Tensor):
        return result
    return result, *statistics(x, each, c["eps"], plain[1:])


def _by_channel(c: Call, x: Expected, own: bool, indices: list[Tensor], out: Tensor) -> Expected:
    """Normalise with each channel's own statistics, or with the running ones."""
    channels = [x.shape[1]] + [1] * (x.ndim - 2)
    if own:
        z = standardized(x, indices, c["eps"])
        return affine(z, x.mask, c["weight"], c["bias"], channels, out.dtype)
    mean, var = c["running_mean"], c["running_var"]
    z = (_wide(x).data - mean.data.reshape(channels)) / (var.data.reshape(channels) + c["eps"]).sqrt()
    mask = x.mask & (mean.mask & var.mask).reshape(channels).expand(x.shape)
    return affine(z, mask, c["weight"], c["bias"], channels, out.dtype)


def _without_updates(c: Call) -> Any:
    """Plain torch's result, computed on copies of the running statistics, so as not to update them."""
    names = ("running_mean", "running_var")
    return c.plain(**{n: s.data.clone() for n in names if isinstance(s := c.get(n), Expected)})


def _update_running(c: Call, x: Expected, indices: list[Tensor], rows: int = 1) -> None:
    """Each channel's running statistics after the call.

    The mean changes if the channel has a valid element, the variance if it has two. In instance norm a channel has a
    slice in each of several `rows`, whose statistics are averaged.
    """
    momentum = c["momentum"]
    values = [group.values[0].detach() for group in groups([_wide(x)], indices)]
    for name, least in (("running_mean", 1), ("running_var", 2)):
        running = c.get(name)
        if not isinstance(running, Expected):
            continue
        updated = running.data.detach().clone()
        channels = len(values) // rows
        for channel in range(channels):
            of_channel = [v for v in values[channel::channels] if len(v) >= least]
            batch = [v.mean() if name == "running_mean" else v.var() for v in of_channel]
            if batch:
                updated[channel] = (1 - momentum) * updated[channel] + momentum * torch.stack(batch).mean()
        c.updates[name] = Expected(updated.to(running.data.dtype), running.mask, running.masked)


@oracle("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
def batch_norm(c: Call) -> Any:
    """Statistics of each channel over its valid elements in training, the running ones otherwise."""
    x = c.get("input", c.get("self"))
    if x.ndim < 2:
        raise NoOracle(f"{c.name} of a vector")
    training = c.get("training", True)
    plain = _without_updates(c)
    out = plain if isinstance(plain, Tensor) else plain[0]
    indices = list(slices(x.shape, [d for d in range(x.ndim) if d != 1]))
    result = _by_channel(c, x, training, indices, out)
    if training:
        _update_running(c, x, indices)
    if isinstance(plain, Tensor):
        return result
    if not training or len(plain) > 3:
        raise NoOracle(f"{c.name} (what it saves for backward)")
    return result, *statistics(x, indices, c["eps"], plain[1:])


@oracle("renorm")
def renorm(c: Call) -> Any:
    """Each slice scaled down to the maximum norm, if the norm of its valid elements exceeds it."""
    x, dim, most = c["self"], c["dim"] % c["self"].ndim, c["maxnorm"]

    def one(group: Group) -> Tensor:
        (values,) = group.values
        norm = torch.linalg.vector_norm(values, c["p"])
        return values * (most / (norm + 1e-7)) if bool(norm > most) else values

    return map_groups(groups([x], slices(x.shape, [d for d in range(x.ndim) if d != dim])), one, x.data, x.mask)


@oracle("instance_norm")
def instance_norm(c: Call) -> Expected:
    """Statistics of each channel of each row."""
    x = c["input"]
    out = _without_updates(c)
    indices = list(slices(x.shape, range(2, x.ndim)))
    if c["use_input_stats"]:
        _update_running(c, x, indices, x.shape[0])
    return _by_channel(c, x, c["use_input_stats"], indices, out)
