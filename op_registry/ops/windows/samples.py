"""Constant padding and interpolation of tensors that know which positions are there.

Law: each sample is padded at its own ends, and its own edge continues where interpolation reads beyond it. Samples are
contiguous along these dimensions; interpolation gets them from index 0 on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    MOVEMENT,
    POOLING,
    Dense,
    MaskedSemanticsError,
    Number,
    Rule,
    as_bool,
    as_int8,
    by_rule,
    extents,
    masked_rule,
    packet_name,
)
from op_registry.ops.windows.crops import Geometry, crops, numbered_after, per_sample, placed
from op_registry.ops.windows.interpolation import LINEAR, NEAREST, upsample_vec
from op_registry.ops.windows.pooling import spatial_dims

Sizes = Sequence[int]

aten = torch.ops.aten


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
    there = per_sample(each, x)
    firsts = [next((along[d] for along in known if along[d] is not None), None) for d in (-2, -1)]
    for n, (w, own) in enumerate(zip(windows, each, strict=True)):
        dim = x.ndim - 2 + n
        if (along := firsts[n]) is not None:
            firsts[n] = numbered_after(x, dim, w, as_int8(placed(own, x, dim, x.ndim - 2)), along)
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
