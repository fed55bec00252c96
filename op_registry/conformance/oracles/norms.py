"""Normalisations by hand: mean and variance of each compressed slice, then the affine parameters, elementwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def _saved(slots: tuple[Slot, Slot], plain: Sequence[Tensor]) -> Iterable[Slot]:
    """The statistics in the shapes that plain torch gives them, differentiable where they are there."""
    for slot, like in zip(slots, plain, strict=True):
        data = slot.data if like.requires_grad else slot.data.detach()
        yield Slot(data.reshape(like.shape).to(like.dtype), slot.mask.reshape(like.shape))


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
    return result, *_saved((mean, rstd), plain[1:])


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
    return result, *_saved((mean, rstd), plain[1:])


def _by_channel(c: Call, x: Slot, own: bool, slices: list[Tensor], out: Tensor) -> Slot:
    channels = [x.shape[1]] + [1] * (x.ndim - 2)
    if own:
        z = standardized(x, slices, c["eps"])
        return affine(z, x.mask, c["weight"], c["bias"], channels, out.dtype)
    mean, var = c["running_mean"], c["running_var"]
    z = (_wide(x.data) - mean.data.reshape(channels)) / (var.data.reshape(channels) + c["eps"]).sqrt()
    mask = x.mask & (mean.mask & var.mask).reshape(channels).expand(x.shape)
    return affine(z, mask, c["weight"], c["bias"], channels, out.dtype)


def _without_updates(c: Call) -> Any:
    """What plain torch gives, running statistics copied so that it changes none."""
    names = ("running_mean", "running_var")
    return c.plainly({n: s.data.clone() for n in names if isinstance(s := c.get(n), Slot)})


def _update_running(c: Call, x: Slot, slices: list[Tensor], copies: int = 1) -> None:
    """Each channel's running statistics after the call: left alone without a valid element, the variance without two.

    With `copies` (instance norm) a channel has a slice in every row, and what these say is averaged.
    """
    momentum = c["momentum"]
    flat, mask = _wide(x.data.reshape(-1)).detach(), x.mask.reshape(-1)
    for name, least in (("running_mean", 1), ("running_var", 2)):
        slot = c.get(name)
        if not isinstance(slot, Slot):
            continue
        new = slot.data.detach().clone()
        channels = len(slices) // copies
        for channel in range(channels):
            rows = [flat[at[mask[at]]] for at in slices[channel::channels]]
            said = [v.mean() if name == "running_mean" else v.var() for v in rows if len(v) >= least]
            if said:
                new[channel] = (1 - momentum) * new[channel] + momentum * torch.stack(said).mean()
        c.updates[name] = Slot(new.to(slot.data.dtype), slot.mask, slot.masked)


@oracle("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
def batch_norm(c: Call) -> Any:
    """Statistics of each channel over its valid elements in training, the running ones otherwise."""
    x = c.get("input", c.get("self"))
    if x.ndim < 2:
        raise NoOracle(f"{c.name} of a vector")
    training = c.get("training", True)
    plain = _without_updates(c)
    out = plain if isinstance(plain, Tensor) else plain[0]
    slices = list(lines(x.shape, [d for d in range(x.ndim) if d != 1]))
    result = _by_channel(c, x, training, slices, out)
    if training:
        _update_running(c, x, slices)
    if isinstance(plain, Tensor):
        return result
    if not training or len(plain) > 3:
        raise NoOracle(f"{c.name} (what it saves for backward)")
    return result, *_saved(statistics(x, slices, c["eps"]), plain[1:])


@oracle("renorm")
def renorm(c: Call) -> Slot:
    """Each slice scaled down to the greatest norm that is allowed, if its valid elements exceed it."""
    x, dim, most = c["self"], c["dim"] % c["self"].ndim, c["maxnorm"]
    flat, mask = x.data.reshape(-1), x.mask.reshape(-1)
    where_to, pieces = [], []
    for at in lines(x.shape, [d for d in range(x.ndim) if d != dim]):
        kept = at[mask[at]]
        if len(kept):
            norm = torch.linalg.vector_norm(flat[kept], c["p"])
            where_to.append(kept)
            pieces.append(flat[kept] * (most / (norm + 1e-7)) if bool(norm > most) else flat[kept])
    return Slot(scatter_back(x.data, where_to, pieces), x.mask)


@oracle("instance_norm")
def instance_norm(c: Call) -> Slot:
    """Statistics of each channel of each row."""
    x = c["input"]
    out = _without_updates(c)
    slices = list(lines(x.shape, range(2, x.ndim)))
    if c["use_input_stats"]:
        _update_running(c, x, slices, x.shape[0])
    return _by_channel(c, x, c["use_input_stats"], slices, out)
