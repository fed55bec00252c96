"""Interpolation, and sampling at grid points (torch.nn.functional.grid_sample and its kernels).

Law: the weighted mean of the valid elements, valid where one of them has a non-zero weight. Nearest-neighbour
interpolation moves an element with its validity; linear interpolation is renormalised by the weight of the valid
elements. Bicubic and antialiasing weights may be negative, so a part of them gives no mean: there, every element with a
non-zero weight must be valid.

Law of grid sampling: the sum over the valid taps of a grid point, times (weight of all taps inside the input) / (weight
of the valid ones), as in interpolation. With 'zeros', taps outside are padding, which counts in neither weight. Of
bicubic weights, every tap inside with a weight must be valid. The result is valid if the grid point is, and if a tap
with a weight is valid or no tap lies inside (where torch gives 0).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry import extents
from op_registry.authoring import (
    MOVEMENT,
    POOLING,
    Bound,
    Dense,
    Equation,
    MaskedSemanticsError,
    NotLowered,
    Number,
    Rule,
    Sparse,
    as_bool,
    as_int8,
    by_rule,
    intersect,
    masked_rule,
    on_call,
    packet_name,
    shape_alone,
)
from op_registry.ops.windows.padding import Geometry, crops, numbered_after, per_sample, placed
from op_registry.ops.windows.pooling import averaged, numeric_validity, spatial_dims
from op_registry.sparse.on_values import select_along

aten = torch.ops.aten


NEAREST = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
)
LINEAR = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d)
# Not every supported version of torch has the last one.
NEEDS_ALL_VALID = tuple(
    getattr(aten, name)
    for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa")
    if hasattr(aten, name)
)


def defaults(packets: Sequence[OpOverloadPacket]) -> list[OpOverload]:
    return [packet.default for packet in packets]


@masked_rule(*defaults(NEAREST), category=POOLING, takes_op=True, torch_if_valid=True)
def upsample_nearest(op: OpOverload, self: Dense, output_size: Sequence[int], *scales: float | None) -> Dense:
    data = op(self.data, output_size, *scales)
    return Dense(data, as_int8(op(numeric_validity(self, spatial_dims(op)), output_size, *scales) != 0))


@masked_rule(*defaults(LINEAR), category=POOLING, takes_op=True)
def upsample_linear(
    op: OpOverload, self: Dense, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Dense:
    def interpolate(x: Tensor) -> Any:
        return op(x, output_size, align_corners, *scales)

    return averaged(interpolate, self, spatial_dims(op), to_integer=torch.round)


@masked_rule(*defaults(NEEDS_ALL_VALID), category=POOLING, takes_op=True, torch_if_valid=True)
def upsample_every(
    op: OpOverload, self: Dense, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Dense:
    """Valid where no invalid element has a weight, which is decided dimension by dimension."""
    data = op(self.filled(0), output_size, align_corners, *scales)
    invalid = 1 - numeric_validity(self, 2)
    vertical, horizontal = scales or (None, None)

    def has_weight(dim: int, scale: float | None) -> Tensor:
        """(in, out): 1 where an output has a weight on an input along one dimension."""
        size = invalid.shape[dim]
        basis = torch.eye(size, dtype=invalid.dtype, device=invalid.device)[None, None]
        weights = op(basis, [size, output_size[dim]], align_corners, None, scale)
        # Rounding leaves tiny values where there is no weight.
        return (weights[0, 0].abs() > 1e-6).to(invalid.dtype)

    invalid_taps = torch.matmul(has_weight(-2, vertical).T, torch.matmul(invalid, has_weight(-1, horizontal)))
    return Dense(data, as_int8(invalid_taps < 0.5))


VEC_RULES = {
    packet.vec: rule
    for rule, packets in ((upsample_nearest, NEAREST), (upsample_linear, LINEAR), (upsample_every, NEEDS_ALL_VALID))
    for packet in packets
}


@masked_rule(*VEC_RULES, category=POOLING, takes_op=True)
def upsample_vec(op: OpOverload, input: Dense, output_size: Sequence[int] | None, *options: Any) -> Any:
    """The overloads that torch.nn.functional calls: with an output size, or with scale factors as the last argument."""
    *align_corners, factors = options
    default = getattr(aten, packet_name(op)).default
    run = VEC_RULES[op].bind(default)
    if output_size is not None:
        return run(input, output_size, *align_corners)
    spatial = spatial_dims(op)
    sizes = [math.floor(n * f) for n, f in zip(input.shape[-spatial:], factors, strict=True)]
    return run(input, sizes, *align_corners, *factors)


# ---------------------------------------------------------------------------------------------------- on sparse storage


@upsample_nearest.lowering(Sparse)
@upsample_vec.lowering(Sparse)
@on_call(elements=True)
def select_nearest(c: Bound) -> Sparse:
    """Select along each dimension the indices that torch's 1-d kernel selects from a range."""
    x, name = c.first, packet_name(c.op)
    if "nearest" not in name or not x.dtype.is_floating_point:
        raise NotLowered("it is a weighted mean of neighbours, or torch has another kernel for its dtype")
    size = c.map(lambda r: shape_alone(r.shape), Sparse).applied(c.op).shape
    nearest_1d = aten._upsample_nearest_exact1d.default if "exact" in name else aten.upsample_nearest1d.default
    factors = c.scale_factors if "scale_factors" in c else [v for n, v in c.named.items() if n.startswith("scales")]
    indices = {}
    for n, dim in enumerate(range(2, x.ndim)):
        positions = torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).reshape(1, 1, -1)
        scale = factors[n] if factors else None
        indices[dim] = nearest_1d(positions, [size[dim]], scale).reshape(-1).to(torch.int64)
    return select_along(x, indices)


# ------------------------------------------------------------------------------------------------------- padded batches

# Constant padding, im2col and interpolation of tensors that know which positions are there: each sample is padded at
# its own ends, and its own edge continues where interpolation reads beyond it. Samples are contiguous along these
# dimensions; interpolation gets them from index 0 on.

Sizes = Sequence[int]


def within_samples(rule: Rule) -> Rule:
    """For `masked_rule`: the rule is not registered; it runs where windows meet an extent."""
    extents.WITHIN_SAMPLES.update(dict.fromkeys(rule.ops, rule))
    return rule


def changed_along(
    factors: Sequence[extents.Factor], dim: int, change: Callable[[Tensor], Tensor]
) -> list[extents.Factor]:
    """The factors, with another boolean where they depend on `dim`."""
    return [f if f.along[dim] is None else extents.Factor(f.along, as_int8(change(as_bool(f.there)))) for f in factors]


def finished(result: Dense, factors: Sequence[extents.Factor]) -> Dense:
    """A result that is valid only where these factors say that it is there."""
    return extents.finished(extents.with_factors(result, factors, padded=False))


@masked_rule(aten.constant_pad_nd.default, category=MOVEMENT, register=within_samples)
def constant_pad_nd(x: Dense, pad: Sequence[int], value: Number = 0) -> Dense:
    data = aten.constant_pad_nd(x.data, pad, value)
    validity = x.full_validity
    assert validity is not None
    valid = as_bool(aten.constant_pad_nd(validity, pad, 1))
    factors = list(extents.factors_of(x))
    for n in range(len(pad) // 2):
        before, after = pad[2 * n], pad[2 * n + 1]
        dim = x.ndim - 1 - n
        own = extents.along_dim(x, dim)
        if own is None or (before == 0 and after == 0):
            continue
        sizes = [0, 0] * n + [before, after]
        # The sample's elements lie `before` places further on, and what it is padded with around them.
        elements = as_bool(aten.constant_pad_nd(own, sizes, 0))
        data, valid = torch.where(elements, data, value), torch.where(elements, valid, True)
        factors = changed_along(factors, dim, functools.partial(_grown, last=n, before=before, after=after))
    return finished(Dense(data.to(x.dtype), as_int8(valid)), factors)


def _grown(there: Tensor, last: int, before: int, after: int) -> Tensor:
    """Where contiguous samples are there after their own padding: it begins where they began."""
    dim = there.ndim - 1 - last
    size = there.shape[dim]
    index = torch.arange(size, device=there.device).reshape([-1, *[1] * last])
    count = there.sum(dim, keepdim=True)
    start = torch.where(there, index, size).amin(dim, keepdim=True) if size else count
    start = torch.where(count > 0, start, 0)
    places = torch.arange(size + before + after, device=there.device).reshape([-1, *[1] * last])
    return (places >= start) & (places < start + count + before + after)


@masked_rule(aten.im2col.default, category=MOVEMENT, register=within_samples)
def im2col(x: Dense, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Dense:
    """The windows of each sample, in a dimension merged of those along height and width."""
    known = [f.along for f in extents.factors_of(x)]
    if any(along[-3] is not None for along in known):
        raise MaskedSemanticsError(
            f"im2col of a tensor of shape {tuple(x.shape)} joins its channels, on which depends which of its positions "
            "are there. Treat what is not there as missing values instead, x.without_extent()."
        )
    own = extents.there(x)
    # What a window reads beyond a sample is the sample's own padding: zeros, and valid.
    valid = ~own if x.validity is None else as_bool(x.validity) | ~own
    given = Dense(torch.where(own, x.data, 0), as_int8(valid))
    result: Dense = by_rule(aten.im2col.default, given, kernel_size, dilation, padding, stride)
    options = zip(x.shape[-2:], kernel_size, dilation, padding, stride, strict=True)
    windows = [Geometry((size + 2 * p - d * (k - 1) - 1) // s + 1, k, s, p, p, d) for size, k, d, p, s in options]
    each = [w.of_crop(box) for w, box in zip(windows, crops(x, 2), strict=True)]
    there = per_sample(each)
    firsts = [next((along[d] for along in known if along[d] is not None), None) for d in (-2, -1)]
    for n, (w, own) in enumerate(zip(windows, each, strict=True)):
        dim = x.ndim - 2 + n
        if (along := firsts[n]) is not None:
            firsts[n] = numbered_after(x, dim, w, as_int8(placed(own, n, 2)), along)
    parts = [(w.out, part) for w, part in zip(windows, firsts, strict=True) if part is not None or w.out != 1]
    merged = parts[0][1] if len(parts) == 1 else extents.Merged(tuple(parts))
    of_windows = extents.Factor((*known[0][:-3], None, merged), as_int8(there.flatten(-2)))
    others = extents.without(x, [x.ndim - 2, x.ndim - 1])
    return finished(result, [*(f.moved(f.along[:-1], lambda t: t.squeeze(-1)) for f in others), of_windows])


@masked_rule(*[packet.vec for packet in (*NEAREST, *LINEAR)], category=POOLING, takes_op=True, register=within_samples)
def upsample(op: OpOverload, input: Dense, output_size: Sequence[int] | None, *options: Any) -> Dense:
    *align_corners, factors = options
    if output_size is not None or any(align_corners):
        given = f"the output size {list(output_size)}" if output_size is not None else "align_corners=True"
        raise MaskedSemanticsError(
            f"{packet_name(op)} of a padded batch of shape {tuple(input.shape)} by {given} would scale each sample by "
            "its own length. Interpolate by a scale_factor, without align_corners; or each sample before they are "
            "padded to a batch."
        )
    spatial = spatial_dims(op)
    data, validity, found = input.data, input.full_validity, list(extents.factors_of(input))
    assert validity is not None
    for d, factor in enumerate(factors):
        dim = input.ndim - spatial + d
        own = extents.along_dim(input, dim)
        if own is None:
            continue
        size = input.shape[dim]
        index = torch.arange(size, device=data.device).reshape([-1, *[1] * (spatial - 1 - d)])
        length = as_bool(own).sum(dim, keepdim=True)
        edge = torch.minimum(index, (length - 1).clamp(min=0)).expand(input.shape)
        data, validity = data.gather(dim, edge), validity.gather(dim, edge)
        found = changed_along(found, dim, functools.partial(_scaled, dim=dim, size=size, factor=factor))
    result: Dense = upsample_vec.run(op, Dense(data, validity), None, *options)
    return finished(result, found)


def _scaled(there: Tensor, dim: int, size: int, factor: float) -> Tensor:
    """The first positions of each sample in a dimension that is interpolated by a factor."""
    count = (there.sum(dim, keepdim=True).to(torch.float64) * factor).floor()
    shape = [-1 if d == dim else 1 for d in range(there.ndim)]
    return torch.arange(int(size * factor), device=there.device).reshape(shape) < count


# -------------------------------------------------------------------------------------------------------- grid sampling

# torch's kernel runs on the filled data, on the mask and on ones. So we use its weights, and they are differentiable in
# the grid.

BICUBIC = 2
ZEROS = 0


@masked_rule(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    aten._grid_sampler_2d_cpu_fallback.default,
    category=POOLING,
    takes_op=True,
    dims=Equation("nchw,nxyk->ncxy", "ncdhw,nzxyk->nczxy", indexed="dhw"),
)
def grid_sampler(
    op: OpOverload, input: Dense, grid: Dense, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Dense:
    points = grid.filled(0)
    options = (interpolation_mode, padding_mode, align_corners)
    points_valid = None if grid.validity is None else as_int8(as_bool(grid.validity).all(-1)).unsqueeze(1)
    if input.validity is None:
        return Dense(op(input.data, points, *options), points_valid)
    # Data and mask in one dtype: in half precision, torch rounds where a grid point lies.
    mask = numeric_validity(input, input.ndim - 2).expand(input.shape[0], -1, *input.shape[2:]).to(input.dtype)
    if interpolation_mode == BICUBIC:
        data = op(input.filled(0), points, *options)
        return Dense(data, intersect(bicubic_validity(mask, points, *options), points_valid))
    data = op(input.filled(0), points, *options)
    weight_of_valid = op(mask, points, *options)
    weight_inside = op(torch.ones_like(mask[:, :1]), points, *options)
    some_valid, none_inside = weight_of_valid != 0, weight_inside == 0
    share = torch.where(some_valid, weight_inside, 1) / torch.where(some_valid, weight_of_valid, 1)
    return Dense(data * share, intersect(as_int8(some_valid | none_inside), points_valid))


@masked_rule(
    aten.cudnn_grid_sampler.default,
    category=POOLING,
    torch_if_valid=True,
    dims=Equation("nchw,nxyk->ncxy", "ncdhw,nzxyk->nczxy", indexed="dhw"),
)
def cudnn_grid_sampler(self: Dense, grid: Dense) -> Dense:
    """Bilinear, with zeros outside and aligned corners."""
    return by_rule(aten.grid_sampler_2d.default, self, grid, 0, ZEROS, True)


# -------------------------------------------------------------------------------------------------------------- bicubic


def bicubic_validity(mask: Tensor, points: Tensor, *options: Any) -> Tensor:
    """(N, C or 1, H_out, W_out) int8: where no invalid element of `mask` has a weight.

    mask    (N, C or 1, H, W), 1 where valid
    points  (N, H_out, W_out, 2)

    Weights of both signs could cancel in one sum over the invalid elements. So torch's kernel gets them in 16 parts,
    and a grid point's 4 x 4 taps meet at most one element of each part (clipped or reflected taps still lie in 4
    adjacent elements of a dimension). This uses the weights as torch rounds them, in half precision too.
    """
    points = points.detach()
    has_weight = torch.zeros(*mask.shape[:2], *points.shape[1:3], dtype=torch.bool, device=mask.device)
    for first_row, first_column in itertools.product(range(min(4, mask.shape[2])), range(min(4, mask.shape[3]))):
        part = torch.zeros_like(mask)
        part[..., first_row::4, first_column::4] = 1 - mask[..., first_row::4, first_column::4]
        has_weight |= aten.grid_sampler_2d(part, points, *options) != 0
    return as_int8(~has_weight)
