"""Normalisations by hand: mean and variance of each compressed slice, then the affine parameters, elementwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.slots import Call, NoOracle, Slot, lines, oracle, scatter_back


def _wide(data: Tensor) -> Tensor:
    return data.to(torch.float32) if data.dtype in (torch.float16, torch.bfloat16) else data


def standardized(x: Slot, slices: Iterable[Tensor], eps: float, centred: bool = True) -> Tensor:
    """Each slice (flat positions) with its own mean taken off and divided by its own deviation."""
    flat, mask = _wide(x.data.reshape(-1)), x.mask.reshape(-1)
    where_to, pieces = [], []
    for at in slices:
        kept = at[mask[at]]
        if not len(kept):
            continue
        values = flat[kept]
        mean = values.mean() if centred else torch.zeros((), dtype=values.dtype)
        spread = ((values - mean) ** 2).mean()
        where_to.append(kept)
        pieces.append((values - mean) / (spread + eps).sqrt())
    return scatter_back(x.data, where_to, pieces)


def statistics(x: Slot, slices: Iterable[Tensor], eps: float) -> tuple[Slot, Slot]:
    """Mean and reciprocal deviation of each slice; torch gives no derivatives of them."""
    flat, mask = _wide(x.data.detach().reshape(-1)), x.mask.reshape(-1)
    means, rstds, known = [], [], []
    for at in slices:
        values = flat[at[mask[at]]]
        known.append(bool(len(values)) or not len(at))
        values = values if len(values) else torch.zeros(1, dtype=flat.dtype)
        means.append(values.mean())
        rstds.append((((values - values.mean()) ** 2).mean() + eps).rsqrt())
    valid = torch.tensor(known, dtype=torch.bool)
    nothing = torch.zeros(0, dtype=flat.dtype)
    return tuple(Slot(torch.stack(s) if s else nothing, valid) for s in (means, rstds))  # type: ignore[return-value]


def affine(
    z: Tensor, mask: Tensor, weight: Slot | None, bias: Slot | None, shape: list[int], dtype: torch.dtype
) -> Slot:
    """Weight and bias, reshaped to broadcast, applied elementwise."""
    for parameter, name in ((weight, "weight"), (bias, "bias")):
        if parameter is None:
            continue
        data, known = parameter.data.reshape(shape), parameter.mask.reshape(shape)
        z = z * data if name == "weight" else z + data
        mask = mask & known.expand(z.shape)
    return Slot(z.to(dtype), mask)


@oracle("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(c: Call) -> Any:
    """Statistics over the valid elements of the trailing dimensions."""
    x, shape = c["input"], list(c["normalized_shape"])
    plain = c.plainly()
    out = plain if isinstance(plain, Tensor) else plain[0]
    dims = range(x.ndim - len(shape), x.ndim)
    eps = c["eps"] if c["eps"] is not None else torch.finfo(x.data.dtype).eps
    z = standardized(x, lines(x.shape, dims), eps, centred="rms" not in c.name)
    result = affine(z, x.mask, c["weight"], c.get("bias"), shape, out.dtype)
    if c.name != "native_layer_norm":
        return result
    mean, rstd = statistics(x, lines(x.shape, dims), eps)
    return result, *(
        Slot(s.data.reshape(p.shape), s.mask.reshape(p.shape)) for s, p in zip((mean, rstd), plain[1:], strict=True)
    )


@oracle("group_norm", "native_group_norm")
def group_norm(c: Call) -> Any:
    """Statistics over the valid elements of each group of channels."""
    x = c["input"]
    groups = c.get("num_groups", c.get("group"))
    plain = c.plainly()
    out = plain if isinstance(plain, Tensor) else plain[0]
    n, channels = x.shape[:2]
    slices = list(torch.arange(x.data.numel()).reshape(n * groups, -1)) if x.data.numel() else []
    z = standardized(x, slices, c["eps"])
    result = affine(z, x.mask, c["weight"], c["bias"], [channels] + [1] * (x.ndim - 2), out.dtype)
    if isinstance(plain, Tensor):
        return result
    mean, rstd = statistics(x, slices, c["eps"])
    return result, *(
        Slot(s.data.reshape(p.shape), s.mask.reshape(p.shape)) for s, p in zip((mean, rstd), plain[1:], strict=True)
    )


def _by_channel(c: Call, x: Slot, own: bool, slices: list[Tensor], out: Tensor) -> Slot:
    channels = [x.shape[1]] + [1] * (x.ndim - 2)
    if own:
        z = standardized(x, slices, c["eps"])
        return affine(z, x.mask, c["weight"], c["bias"], channels, out.dtype)
    mean, var = c["running_mean"], c["running_var"]
    z = (_wide(x.data) - mean.data.reshape(channels)) / (var.data.reshape(channels) + c["eps"]).sqrt()
    mask = x.mask & (mean.mask & var.mask).reshape(channels).expand(x.shape)
    return affine(z, mask, c["weight"], c["bias"], channels, out.dtype)


@oracle("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
def batch_norm(c: Call) -> Any:
    """Statistics of each channel over its valid elements in training, the running ones otherwise."""
    x = c.get("input", c.get("self"))
    if x.ndim < 2:
        raise NoOracle(f"{c.name} of a vector")
    training = c.get("training", True)
    changed = {
        name: Slot(s.data.clone(), s.mask)
        for name in ("running_mean", "running_var")
        if isinstance(s := c.get(name), Slot)
    }
    plain = Call(c.op, {**c.bound, **changed}).plainly()
    out = plain if isinstance(plain, Tensor) else plain[0]
    if not isinstance(plain, Tensor):
        raise NoOracle(f"{c.name} (its saved statistics)")
    slices = list(lines(x.shape, [d for d in range(x.ndim) if d != 1]))
    return _by_channel(c, x, training, slices, out)


@oracle("instance_norm")
def instance_norm(c: Call) -> Slot:
    """Statistics of each channel of each row."""
    x = c["input"]
    changed = {
        name: Slot(s.data.clone(), s.mask)
        for name in ("running_mean", "running_var")
        if isinstance(s := c.get(name), Slot)
    }
    out = Call(c.op, {**c.bound, **changed}).plainly()
    return _by_channel(c, x, c["use_input_stats"], list(lines(x.shape, range(2, x.ndim))), out)
