"""Pooling and interpolation, window by window, in loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.call import Call, Expected, NoOracle, oracle, valid
from op_registry.conformance.oracles.engine import Group, Results, groups, reduce_groups
from op_registry.conformance.oracles.positions import write
from op_registry.conformance.oracles.products import per_dimension


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
