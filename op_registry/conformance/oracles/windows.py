"""Pooling and interpolation, window by window, in loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from op_registry.conformance.oracles.products import _pair
from op_registry.conformance.oracles.slots import Call, NoOracle, Slot, oracle

Window = tuple[list[list[int]], int]


def _planes(x: Slot, n: int) -> tuple[Tensor, Tensor]:
    """Data and mask as (planes, elements of a plane)."""
    size = math.prod(x.shape[-n:])
    return x.data.reshape(-1, size), x.mask.reshape(-1, size)


def _sliding(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> list[tuple[list[int], int]]:
    """For each place: the input positions inside, and how many taps there are, padding included."""
    found = []
    for o in range(out):
        start = o * stride - padding
        taps = [start + k * dilation for k in range(kernel)]
        inside = [t for t in taps if 0 <= t < size]
        found.append((inside, len([t for t in taps if t < size + padding])))
    return found


def _adaptive(size: int, out: int) -> list[tuple[list[int], int]]:
    found = []
    for o in range(out):
        taps = list(range(o * size // out, -((o + 1) * size // -out)))
        found.append((taps, len(taps)))
    return found


def _flat(places: Sequence[tuple[list[int], int]], sizes: Sequence[int]) -> tuple[Tensor, int]:
    """The flat positions of a window, and its taps with padding."""
    positions = []
    for at in itertools.product(*(p[0] for p in places)):
        position = 0
        for i, size in zip(at, sizes, strict=True):
            position = position * size + i
        positions.append(position)
    return torch.tensor(positions, dtype=torch.int64), math.prod(p[1] for p in places)


def pool(
    x: Slot, out: Tensor, per_dim: Sequence[list[tuple[list[int], int]]], one: Callable[[Tensor, Tensor, int, int], Any]
) -> tuple[list[Tensor], Tensor]:
    """`one(values, kept positions, window's elements, window's taps)` for each window of each plane.

    Gives the results' flat pieces (one list a result) and validity: where something valid was in the window, or
    nothing at all.
    """
    n = len(per_dim)
    data, mask = _planes(x, n)
    windows = [_flat(places, x.shape[-n:]) for places in itertools.product(*per_dim)]
    plain = out.reshape(-1)
    pieces: list[Tensor] = []
    known: list[bool] = []
    for plane, plane_mask in zip(data, mask, strict=True):
        for at, taps in windows:
            kept = at[plane_mask[at]]
            known.append(bool(len(kept)) or not len(at))
            pieces.append(one(plane[kept], kept, len(at), taps) if len(kept) else plain[len(pieces)])
    return pieces, torch.tensor(known, dtype=torch.bool).reshape(out.shape)


def _sizes(x: Slot, n: int) -> list[int]:
    return list(x.shape[-n:])


@oracle("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(c: Call) -> Slot:
    """The sum over valid elements and counted padding, unless a divisor is given."""
    x, n = c["self"], int(c.name[-2])
    out = c.plainly()
    kernel = _pair(c["kernel_size"], n)
    stride = _pair(c["stride"], n) if c["stride"] else kernel
    padding = _pair(c["padding"], n)
    per_dim = [
        _sliding(size, out.shape[-n + d], kernel[d], stride[d], padding[d], 1) for d, size in enumerate(_sizes(x, n))
    ]
    override, include = c.get("divisor_override"), c["count_include_pad"]

    def one(values: Tensor, kept: Tensor, elements: int, taps: int) -> Tensor:
        divisor = override or (len(values) + (taps - elements if include else 0))
        return values.sum() / divisor

    pieces, mask = pool(x, out, per_dim, one)
    return Slot(torch.stack(pieces).reshape(out.shape).to(out.dtype) if pieces else out, mask)


@oracle(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def adaptive_avg_pool(c: Call) -> Slot:
    """The mean of the valid elements of each window."""
    x, n = c["self"], int(c.name[-2])
    out = c.plainly()
    per_dim = [_adaptive(size, out.shape[-n + d]) for d, size in enumerate(_sizes(x, n))]
    pieces, mask = pool(x, out, per_dim, lambda values, kept, elements, taps: values.mean())
    return Slot(torch.stack(pieces).reshape(out.shape).to(out.dtype) if pieces else out, mask)


def _maxima(c: Call, plain: Any, per_dim: Sequence[list[tuple[list[int], int]]]) -> Any:
    x = c["self"]
    out = plain if isinstance(plain, Tensor) else plain[0]
    places: list[Tensor] = []

    def one(values: Tensor, kept: Tensor, elements: int, taps: int) -> Tensor:
        best = int(values.detach().argmax())
        places.append(kept[best])
        return values[best]

    pieces, mask = pool(x, out, per_dim, one)
    data = Slot(torch.stack(pieces).reshape(out.shape) if pieces else out, mask)
    if isinstance(plain, Tensor):
        return data
    indices = torch.zeros(out.numel(), dtype=torch.int64)
    if places:
        indices[mask.reshape(-1)] = torch.stack(places)
    return data, Slot(indices.reshape(out.shape), mask)


@oracle("""max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices""")
def max_pool(c: Call) -> Any:
    """The greatest valid element of each window, and its place in the plane."""
    x, n = c["self"], int(c.name[8])
    plain = c.plainly()
    out = plain if isinstance(plain, Tensor) else plain[0]
    kernel = _pair(c["kernel_size"], n)
    stride = _pair(c["stride"], n) if c["stride"] else kernel
    padding, dilation = _pair(c["padding"], n), _pair(c["dilation"], n)
    per_dim = [
        _sliding(size, out.shape[-n + d], kernel[d], stride[d], padding[d], dilation[d])
        for d, size in enumerate(_sizes(x, n))
    ]
    return _maxima(c, plain, per_dim)


@oracle("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(c: Call) -> Any:
    """As max_pool, with adaptive windows."""
    x, n = c["self"], int(c.name[-2])
    plain = c.plainly()
    per_dim = [_adaptive(size, plain[0].shape[-n + d]) for d, size in enumerate(_sizes(x, n))]
    return _maxima(c, plain, per_dim)


@oracle("max_unpool2d", "max_unpool3d")
def max_unpool(c: Call) -> Slot:
    """Each element put where its index says, into zeros that are valid; an invalid index puts nothing."""
    x, indices = c["self"], c["indices"]
    n = int(c.name[-2])
    out = c.plainly()
    data, mask = _planes(x, n)
    where_to, known = _planes(indices, n)
    size = math.prod(out.shape[-n:])
    planes, masks = [], []
    for plane, plane_mask, to, to_known in zip(data, mask, where_to, known, strict=True):
        values, valid = torch.zeros(size, dtype=plane.dtype), torch.ones(size, dtype=torch.bool)
        for k in to_known.nonzero()[:, 0].tolist():
            values = values.index_put((to[k],), plane[k])
            valid[to[k]] = plane_mask[k]
        planes.append(values)
        masks.append(valid)
    if not planes:
        return Slot(out, torch.ones(out.shape, dtype=torch.bool))
    return Slot(torch.stack(planes).reshape(out.shape), torch.stack(masks).reshape(out.shape))


def _weights(c: Call, spatial: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Row o of the matrix that a linear interpolation is: its weight on each input element."""
    count = math.prod(spatial)
    basis = torch.eye(count, dtype=dtype).reshape(count, 1, *spatial)
    name = "self" if "self" in c else "input"
    columns = c.run({**c.bound, name: basis}, lambda slot: slot.data).reshape(count, -1)
    yield from columns.T


@oracle(
    """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
)
def interpolate(c: Call) -> Slot:
    """The weighted mean of what is valid; bicubic and antialias need all that has a weight."""
    x = c.get("self", c.get("input"))
    strict = "bicubic" in c.name or c.name.endswith("_aa")
    if not x.data.is_floating_point():
        raise NoOracle("interpolation of integers")
    out = c.plainly()
    spatial = list(x.shape[2:])
    data, mask = _planes(x, len(spatial))
    rows = list(_weights(c, spatial, torch.float64))
    results, known = [], []
    for plane, plane_mask in zip(data, mask, strict=True):
        for row in rows:
            weighted = row.abs() > 1e-9  # rounding leaves dust where there is no weight
            kept = weighted & plane_mask
            ok = bool((weighted == kept).all()) if strict else bool(kept.any())
            known.append(ok or not bool(weighted.any()))
            weight = row[kept].to(plane.dtype)
            total = (plane[kept] * weight).sum()
            results.append(
                total if strict or not bool(kept.any()) else total / weight.sum() * row.sum().to(plane.dtype)
            )
    if not results:
        return Slot(out, torch.ones(out.shape, dtype=torch.bool))
    return Slot(torch.stack(results).reshape(out.shape).to(out.dtype), torch.tensor(known).reshape(out.shape))
