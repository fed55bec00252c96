"""Normalisations: mean and variance of each slice's valid elements, then the affine parameters, elementwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import (
    Call,
    Expected,
    Group,
    NoOracle,
    Refused,
    Results,
    groups,
    map_groups,
    oracle,
    reduce_groups,
    slices,
    valid,
)
from op_registry.conformance.oracles.positions import write
from op_registry.conformance.oracles.products import per_dimension


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


# ---------------------------------------------------------------- pooling and interpolation, window by window, in loops


@dataclass(frozen=True)
class Window:
    """Indices of the input (along one dimension, or flat in a plane), and the number of taps including padding."""

    indices: list[int]
    taps: int


def _sliding(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> list[Window]:
    """The window of each output index along one dimension."""
    windows = []
    for o in range(out):
        start = o * stride - padding
        taps = [start + k * dilation for k in range(kernel)]
        windows.append(Window([t for t in taps if 0 <= t < size], len([t for t in taps if t < size + padding])))
    return windows


def _adaptive(size: int, out: int) -> list[Window]:
    """The window of each output index along one dimension, of adaptive pooling."""
    spans = [range(o * size // out, -((o + 1) * size // -out)) for o in range(out)]
    return [Window(list(span), len(span)) for span in spans]


def _flat(per_dim: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """The flat indices, in a plane of `sizes`, of the product of indices along each dimension."""
    flat = [0]
    for indices, size in zip(per_dim, sizes, strict=True):
        flat = [index * size + i for index in flat for i in indices]
    return flat


def _in_each_plane(x: Expected, n: int, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """The flat indices of each window in each plane of the last n dimensions."""
    size = math.prod(x.shape[-n:])
    in_plane = [torch.tensor(window, dtype=torch.int64) for window in windows]
    for start in range(0, x.data.numel(), size) if size else ():
        yield from (window + start for window in in_plane)


def pool(x: Expected, plain: Results, per_dim: Sequence[list[Window]], one: Callable[[Group, Window], Results]) -> Any:
    """`one` on each window of each plane: valid where the window has a valid element, or none to begin with."""
    sizes = x.shape[-len(per_dim) :]
    windows = [
        Window(_flat([w.indices for w in parts], sizes), math.prod(w.taps for w in parts))
        for parts in itertools.product(*per_dim)
    ]
    each = groups([x], _in_each_plane(x, len(per_dim), [w.indices for w in windows]))
    return reduce_groups(each, lambda group: one(group, windows[group.number % len(windows)]), plain)


def _windows(c: Call, out: Tensor) -> list[list[Window]]:
    """The windows along each dimension: adaptive, or described by kernel_size, stride, padding and dilation."""
    n = int(next(filter(str.isdigit, c.name)))
    sizes, counts = c["self"].shape[-n:], out.shape[-n:]
    if "adaptive" in c.name:
        return [_adaptive(*along) for along in zip(sizes, counts, strict=True)]
    kernel, padding = per_dimension(c["kernel_size"], n), per_dimension(c["padding"], n)
    stride = per_dimension(c["stride"], n) if c["stride"] else kernel
    dilation = per_dimension(c.get("dilation", 1), n)
    return [_sliding(*along) for along in zip(sizes, counts, kernel, stride, padding, dilation, strict=True)]


@oracle(
    """avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d"""
)
def avg_pool(c: Call) -> Any:
    """The sum of the valid elements, divided by their number plus counted padding, or by `divisor_override`."""
    out = c.plain()
    override, include = c.get("divisor_override"), c.get("count_include_pad")

    def one(group: Group, window: Window) -> Tensor:
        padding = window.taps - group.size if include else 0
        return group.values[0].sum() / (override or (len(group.kept) + padding))

    return pool(c["self"], out, _windows(c, out), one)


def _maximum(group: Group, plane_size: int) -> tuple[Tensor, Tensor]:
    """The greatest valid element, and its flat index in the plane."""
    (values,) = group.values
    best = int(values.detach().argmax())
    return values[best], group.flat[best] % plane_size


@oracle(
    """max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"""
)
def max_pool(c: Call) -> Any:
    """The greatest valid element of each window, and its index in the plane."""
    x, plain = c["self"], c.plain()
    per_dim = _windows(c, plain if isinstance(plain, Tensor) else plain[0])
    plane_size = math.prod(x.shape[-len(per_dim) :])
    return pool(x, plain, per_dim, lambda group, window: _maximum(group, plane_size))


@oracle("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(c: Call) -> Any:
    """The greatest valid element of each window. Torch's result for ascending input shows where each window ends."""
    x, samples = c["self"], c["random_samples"]
    plain = c.plain()
    if not plain[0].numel():
        return tuple(map(valid, plain))
    n = 2 if c.name.endswith("2d") else 3
    sizes, kernel = x.shape[-n:], list(c["kernel_size"])
    plane_size = math.prod(sizes)
    # In ascending input, the maximum of a window is its last element.
    ascending = torch.arange(float(plane_size), dtype=torch.float64).reshape(sizes).expand(x.shape).contiguous()
    _, last = c.op(ascending, kernel, c["output_size"], samples.data.to(torch.float64))

    def window(end: int) -> Tensor:
        corner = [int(i) for i in torch.unravel_index(torch.tensor(end), sizes)]
        return torch.tensor(_flat([range(i - k + 1, i + 1) for i, k in zip(corner, kernel, strict=True)], sizes))

    def in_each_plane() -> Iterable[Tensor]:
        for plane, ends in enumerate(last.flatten(-n).flatten(0, -2).tolist()):
            yield from (window(end) + plane * plane_size for end in ends)

    planes = x.mask.flatten(-n).flatten(0, -2)
    # With an invalid random sample, the plane's windows are unknown.
    mask = planes & samples.mask.reshape(len(planes), -1).all(1, keepdim=True)
    each = groups([Expected(x.data, mask)], in_each_plane())
    return reduce_groups(each, lambda group: _maximum(group, plane_size), [out.detach() for out in plain])


@oracle("max_unpool2d", "max_unpool3d")
def max_unpool(c: Call) -> Expected:
    """Each element is written at its index, into valid zeros; an element with an invalid index is not written."""
    x, indices, n = c["self"], c["indices"], int(c.name[-2])
    zeros = torch.zeros_like(c.plain().detach())
    targets = in_planes(indices, n, math.prod(zeros.shape[-n:]))
    return write(valid(zeros), targets[indices.mask], x.map(lambda t: t[indices.mask]))


def in_planes(indices: Expected, n: int, size: int) -> Tensor:
    """Flat indices, from indices into planes (the last n dimensions) of `size` elements each."""
    in_each = torch.where(indices.mask, indices.data, 0).flatten(-n).flatten(0, -2)
    return (in_each + size * torch.arange(len(in_each))[:, None]).reshape(indices.shape)


def _weights(c: Call, spatial: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Row o of the matrix that a linear interpolation is: the weight of each input element in output element o."""
    count = math.prod(spatial)
    basis = torch.eye(count, dtype=dtype).reshape(count, 1, *spatial)
    columns = c.plain(**{"self" if "self" in c else "input": basis}).reshape(count, -1)
    yield from columns.T


@oracle(
    """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
)
def interpolate(c: Call) -> Any:
    """The weighted mean of the valid elements; bicubic and antialias need every element with a weight to be valid."""
    x = c.get("self", c.get("input"))
    needs_all = "bicubic" in c.name or c.name.endswith("_aa")
    if not x.data.is_floating_point():
        raise NoOracle("interpolation of integers")
    spatial = list(x.shape[2:])
    rows = list(_weights(c, spatial, torch.float64))
    # Zero weights may be slightly off zero because of rounding.
    windows = [(row.abs() > 1e-9).nonzero()[:, 0] for row in rows]
    weights = [row[window].to(x.data.dtype) for row, window in zip(rows, windows, strict=True)]
    totals = [row.sum().to(x.data.dtype) for row in rows]

    def one(group: Group) -> Tensor:
        number = group.number % len(rows)
        weight = weights[number][group.kept]
        total = (group.values[0] * weight).sum()
        return total if needs_all else total / weight.sum() * totals[number]

    each = groups([x], _in_each_plane(x, len(spatial), [window.tolist() for window in windows]))
    return reduce_groups(each, one, c.plain(), (lambda group: group.size) if needs_all else 1)


@oracle("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
def grid_sampler(c: Call) -> Any:
    """The weighted mean of the valid taps, times the weight inside; bicubic needs every tap that has a weight."""
    x, grid, plain = c["input"], c["grid"], c.plain()
    bicubic = c["interpolation_mode"] == 2
    spatial, count = x.shape[2:], math.prod(x.shape[2:])
    points_valid = grid.mask.all(-1).flatten(1)
    basis = torch.eye(count, dtype=grid.data.dtype).reshape(count, 1, *spatial)
    # Sums in at least float32, as the kernels of torch compute in half precision.
    wide = torch.promote_types(x.data.dtype, torch.float32)
    values, masks = [], []
    for sample in range(x.shape[0]):
        points = torch.where(grid.mask[sample], grid.data[sample], 0)
        # (taps, points): the operator is linear in its input.
        weights = c.plain(input=basis, grid=points.expand(count, *points.shape)).flatten(1).to(wide)
        inside = (weights.detach() != 0).to(wide)
        there = x.mask[sample].reshape(-1, count)  # (channels, taps)
        data = torch.where(there, x.data[sample].reshape(-1, count), 0).to(wide)
        value, valid_taps = data @ weights, there.to(wide) @ inside  # (channels, points)
        some = valid_taps > 0
        if not bicubic:
            of_valid = torch.where(some, there.to(wide) @ weights, 1)
            value = torch.where(some, value * weights.sum(0) / of_valid, value)
        taps = inside.sum(0)
        known = valid_taps == taps if bicubic else some | (taps == 0)
        values.append(value.to(plain.dtype))
        masks.append(known & points_valid[sample])
    if not values:
        return valid(plain)
    return Expected(torch.stack(values).reshape(plain.shape), torch.stack(masks).reshape(plain.shape))


# ---------------------------------- lookups of rows in an embedding table, and sums, means and maxima over bags of rows


@oracle("embedding")
def embedding(c: Call) -> Expected:
    """A row of the weight, valid where the index and the row's elements are."""
    weight, indices = c["weight"], c["indices"]
    # Look up valid indices only, because scale_grad_by_freq counts each index that is looked up.
    kept = indices.mask.reshape(-1).nonzero()[:, 0]
    looked_up = c.plain(indices=indices.data.reshape(-1)[kept])
    plain = c.plain()
    data = plain.detach().reshape(-1, plain.shape[-1]).index_put((kept,), looked_up).reshape(plain.shape)
    rows = torch.where(indices.mask, indices.data, 0)
    return Expected(data, weight.mask[rows] & indices.mask.unsqueeze(-1))


@oracle("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(c: Call) -> Any:
    """Sum, mean or maximum of each bag's valid elements; torch's zeros for a bag that is empty or all padding."""
    weight, indices, offsets = c["weight"], c["indices"], c["offsets"]
    if not offsets.all_valid:
        raise Refused("embedding_bag with invalid offsets")
    plain = c.plain()
    starts = offsets.data.tolist()
    ends = [*starts[1:], indices.data.numel()] if not c["include_last_offset"] else starts[1:]
    padding = _padding_index(c, weight.shape[0])
    entries = _entries(c, weight, indices, c["per_sample_weights"])
    flat = torch.arange(entries.data.numel()).reshape(entries.shape)
    in_bags = (indices.mask & (indices.data == padding)).logical_not()
    columns = (
        flat[start:end][in_bags[start:end], column]
        for start, end in zip(starts, ends, strict=False)
        for column in range(weight.shape[1])
    )
    reduce: Callable[[Tensor], Tensor] = (torch.sum, torch.mean, torch.max)[c["mode"]]
    result = reduce_groups(groups([entries], columns), lambda group: reduce(group.values[0]), plain[0].detach())
    return (result, *map(valid, plain[1:]))


def _padding_index(c: Call, rows: int) -> int:
    """The index that bags ignore; -1 if there is none."""
    padding = c.get("padding_idx", -1)
    if padding is None:
        return -1
    return padding % rows if c.op._overloadname == "padding_idx" else padding


def _entries(c: Call, weight: Expected, indices: Expected, factors: Expected | None) -> Expected:
    """(indices, columns): the row of the weight at each index, times its per-sample weight."""
    rows = torch.where(indices.mask, indices.data, 0).to(torch.int64)
    data, mask = weight.data[rows], weight.mask[rows] & indices.mask[:, None]
    if c["scale_grad_by_freq"]:
        counts = torch.bincount(rows[indices.mask], minlength=weight.shape[0]).clamp(min=1)
        data = data.detach() + (data - data.detach()) / counts[rows][:, None]
    if factors is not None:
        data, mask = data * factors.data[:, None], mask & factors.mask[:, None]
    return Expected(data, mask)
