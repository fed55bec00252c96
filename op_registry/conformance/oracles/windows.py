"""Normalisations: mean and variance of each slice's valid elements, then the affine parameters, elementwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def on_units(c: Call, operand: str, sizes: Sequence[int], dtype: torch.dtype, **changes: object) -> Tensor:
    """(elements, elements of a result): the operator on samples of these sizes, 1 at one element and 0 elsewhere."""
    units = torch.eye(math.prod(sizes), dtype=dtype).reshape(-1, *sizes)
    result = c.plain(**{operand: units, **changes})
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first.flatten(1)


def _weights(c: Call, n: int, **changes: object) -> Tensor:
    """(elements of the result, elements of a plane): what each result is of a plane that is 1 at one element, else 0.

    This is the matrix of a linear operator, and shows which elements a maximum is taken of.
    """
    operand = "self" if "self" in c else "input"
    return on_units(c, operand, (1, *c[operand].shape[-n:]), torch.float64, **changes).T


def _read(weights: Tensor) -> list[Tensor]:
    """The flat indices of the elements that each result reads. Weights of 0 may be slightly off because of rounding."""
    return [(row.isfinite() & (row.abs() > 1e-9)).nonzero()[:, 0] for row in weights]


def _in_each_plane(x: Expected, n: int, windows: Sequence[Tensor]) -> Iterator[Tensor]:
    """The flat indices of each window in each plane of the last n dimensions."""
    size = math.prod(x.shape[-n:])
    for start in range(0, x.data.numel(), size) if size else ():
        yield from (window + start for window in windows)


def _dimensions(c: Call) -> int:
    """How many dimensions an operator has in its name."""
    return int(next(filter(str.isdigit, c.name)))


@oracle(
    """avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d"""
)
def avg_pool(c: Call) -> Any:
    """The sum of the valid elements, divided by their number plus counted padding, or by `divisor_override`."""
    x, n, override = c["self"], _dimensions(c), c.get("divisor_override")
    weights = _weights(c, n)

    def one(group: Group) -> Tensor:
        counted = override or round(1 / float(weights[group.number % len(weights)].max()))
        return group.values[0].sum() / (override or counted - (group.size - len(group.kept)))

    return reduce_groups(groups([x], _in_each_plane(x, n, _read(weights))), one, c.plain())


def _maxima(x: Expected, plane_size: int, windows: Iterable[Tensor], plain: Results) -> Any:
    """The greatest valid element of each window, and its flat index in the plane."""

    def one(group: Group) -> tuple[Tensor, Tensor]:
        (values,) = group.values
        best = int(values.detach().argmax())
        return values[best], group.flat[best] % plane_size

    return reduce_groups(groups([x], windows), one, plain)


@oracle(
    """max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"""
)
def max_pool(c: Call) -> Any:
    """The greatest valid element of each window, and its index in the plane."""
    x, plain, n = c["self"], c.plain(), _dimensions(c)
    windows = _in_each_plane(x, n, _read(_weights(c, n)))
    return _maxima(x, math.prod(x.shape[-n:]), windows, plain if isinstance(plain, Tensor) else list(plain))


@oracle("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(c: Call) -> Any:
    """The greatest valid element of each window. Each plane has windows of its own."""
    x, samples, n = c["self"], c["random_samples"], _dimensions(c)
    plain = c.plain()
    if not plain[0].numel():
        return tuple(map(valid, plain))
    plane_size = math.prod(x.shape[-n:])

    def in_each_plane() -> Iterator[Tensor]:
        for plane, drawn in enumerate(samples.data.to(torch.float64).flatten(0, -2)):
            windows = _read(_weights(c, n, random_samples=drawn.expand(plane_size, 1, n)))
            yield from (window + plane * plane_size for window in windows)

    planes = x.mask.flatten(-n).flatten(0, -2)
    # With an invalid random sample, the plane's windows are unknown.
    mask = planes & samples.mask.reshape(len(planes), -1).all(1, keepdim=True)
    return _maxima(Expected(x.data, mask), plane_size, in_each_plane(), [out.detach() for out in plain])


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
    rows = _weights(c, x.ndim - 2)
    windows = _read(rows)
    weights = [row[window].to(x.data.dtype) for row, window in zip(rows, windows, strict=True)]
    totals = [row.sum().to(x.data.dtype) for row in rows]

    def one(group: Group) -> Tensor:
        number = group.number % len(rows)
        weight = weights[number][group.kept]
        total = (group.values[0] * weight).sum()
        return total if needs_all else total / weight.sum() * totals[number]

    each = groups([x], _in_each_plane(x, x.ndim - 2, windows))
    return reduce_groups(each, one, c.plain(), (lambda group: group.size) if needs_all else 1)


@oracle("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
def grid_sampler(c: Call) -> Any:
    """The weighted mean of the valid taps, times the weight inside; bicubic needs every tap that has a weight."""
    x, grid, plain = c["input"], c["grid"], c.plain()
    bicubic = c["interpolation_mode"] == 2
    count = math.prod(x.shape[2:])
    points_valid = grid.mask.all(-1).flatten(1)
    # Sums in at least float32, as the kernels of torch compute in half precision.
    wide = torch.promote_types(x.data.dtype, torch.float32)
    values, masks = [], []
    for sample in range(x.shape[0]):
        points = torch.where(grid.mask[sample], grid.data[sample], 0)
        # (taps, points): the operator is linear in its input.
        on_points = {"grid": points.expand(count, *points.shape)}
        weights = on_units(c, "input", (1, *x.shape[2:]), points.dtype, **on_points).to(wide)
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
