"""Convolution and pooling over masks that mark padding, in force inside ``masked_dispatch.windows("padding")``.

Law: each sample counts as cropped to the bounding box of its valid elements, over all channels; holes inside the box
stay missing values. An output is valid where torch's own size formula gives the crop one, and where one tap is valid or
no tap is in the box (padding alone, the gaps of a transposed convolution). So a batch padded at the end gives the same
results as a loop over its unpadded samples, at any depth. `count_include_pad` counts the crop's own padding, and
adaptive pooling bins each sample's box.

As always, elements outside of the box are invalid and contribute nothing. So, except in adaptive pooling, only the
results' masks and the divisors of averages differ from the rules for missing values.

These rules wait in RULES; the overlay that registers them is made when it is first entered, so that nobody else pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    CONTRACTION,
    MOVEMENT,
    POOLING,
    Bound,
    Dense,
    MaskedSemanticsError,
    Rule,
    as_bool,
    as_int8,
    extents,
    intersect,
    lowest,
    map_tensors,
    masked_rule,
    packet_name,
)
from op_registry.ops.windows import convolution, pooling
from op_registry.ops.windows.convolution import per_dim
from op_registry.ops.windows.crops import (
    Crop,
    Geometry,
    TransposedGeometry,
    adaptive_bins,
    cropped_result,
    crops,
    gather_bins,
    per_sample,
)
from op_registry.ops.windows.pooling import averaged, numeric_validity, spatial_dims, whole

aten = torch.ops.aten
Sizes = Sequence[int]
RULES: list[Rule] = []


def when_padding(rule: Rule) -> Rule:
    """For `masked_rule`: the rule is not registered; it waits for the overlay."""
    RULES.append(rule)
    return rule


def within_samples(rule: Rule) -> Rule:
    """The same, for a rule that also runs where windows meet an extent."""
    extents.WITHIN_SAMPLES.update(dict.fromkeys(rule.ops, rule))
    return when_padding(rule)


# --------------------------------------------------------------------------------------------------------- convolutions


def windows_of(c: Bound, sizes: Sizes) -> Sequence[Geometry | TransposedGeometry]:
    """The windows of a convolution along each dimension, for the sizes of its output."""
    kernel = c.weight.shape[2:]
    spatial = len(kernel)
    strides, dilations = per_dim(c.stride, spatial), per_dim(c.dilation, spatial)
    if convolution.is_transposed(c.named):
        paddings, output_paddings = per_dim(c.padding, spatial), per_dim(c.output_padding, spatial)
        return list(map(TransposedGeometry, sizes, kernel, strides, paddings, dilations, output_paddings))
    if isinstance(c.padding, str):
        totals = [d * (k - 1) if c.padding == "same" else 0 for k, d in zip(kernel, dilations, strict=True)]
        before = [total // 2 for total in totals]
        after = [total - b for total, b in zip(totals, before, strict=True)]
    else:
        before = after = list(per_dim(c.padding, spatial))
    return list(map(Geometry, sizes, kernel, strides, before, after, dilations))


@masked_rule(
    *convolution.conv.ops,
    *convolution.conv_transpose.ops,
    *convolution.any_convolution.ops,
    category=CONTRACTION,
    takes_call=True,
    register=within_samples,
)
def conv(c: Bound) -> Dense:
    """A convolution by the rules for missing values, with the masks of the crops' convolutions."""
    x, weight, bias, *geometry = c.named.values()
    if x.validity is None:
        return convolution.convolution(c.op, x, weight, bias, *geometry)
    filled = None if bias is None else Dense(bias.filled(0))
    result = convolution.convolution(c.op, x, weight, filled, *geometry)
    spatial = weight.ndim - 2
    along = list(zip(windows_of(c, result.shape[-spatial:]), crops(x, spatial), strict=True))
    per_channel = None if bias is None or bias.validity is None else bias.validity.reshape(-1, *[1] * spatial)
    found = cropped_result(result.data, along, x, result.validity)
    return Dense(found.data, intersect(found.validity, per_channel), found.extent)


@masked_rule(aten.conv_tbc.default, category=CONTRACTION, register=within_samples)
def conv_tbc(self: Dense, weight: Dense, bias: Dense, pad: int = 0) -> Dense:
    """Time, batch, channel: conv1d with dimensions in another order (weight: taps, in, out)."""
    x, filter = convolution.permuted(self, (1, 2, 0)), convolution.permuted(weight, (2, 1, 0))
    result = conv.run(aten.conv1d.default, x, filter, bias, (1,), (pad,))
    return convolution.permuted(result, (2, 0, 1))


# -------------------------------------------------------------------------------------------------------------- pooling


def pooling_windows(c: Bound, out: torch.Size) -> list[Geometry]:
    spatial = len(out)
    sizes = (c.kernel_size, c.stride or c.kernel_size, c.padding, c.padding, c.named.get("dilation", (1,)))
    windows = zip(out, *(per_dim(s, spatial) for s in sizes), strict=True)
    return [Geometry(o, k, s, b, a, d, by_ceil=c.ceil_mode) for o, k, s, b, a, d in windows]


@masked_rule(*pooling.avg_pool.ops, category=POOLING, takes_call=True, torch_if_valid=True, register=within_samples)
def avg_pool(c: Bound) -> Dense:
    """The sum of the window, divided by the number of its valid elements and of the crop's own padding in it."""
    self, spatial = c.self, spatial_dims(c.op)
    _, *window = c.named.values()

    def average(x: Tensor) -> Any:
        return c.op(x, *window)

    mask = numeric_validity(self, spatial)
    valid_share = average(mask)
    boxes = crops(self, spatial)
    windows = pooling_windows(c, valid_share.shape[-spatial:])
    along = list(zip(windows, boxes, strict=True))
    found = cropped_result(valid_share, along, self, valid_share != 0)
    validity = found.validity
    assert validity is not None
    if c.named.get("divisor_override") is not None:
        return Dense(averaged(average, self, spatial, divide=False).data, validity, found.extent)
    # The kernel divides by the number of the window's elements in the batch, plus the batch's padding if that counts.
    batch = [Crop(box.start.new_zeros(1), box.start.new_full((1,), box.size), box.size) for box in boxes]
    counted = Geometry.with_padding if c.count_include_pad else Geometry.elements
    divisor = per_sample([counted(window, whole) for window, whole in zip(windows, batch, strict=True)], self)
    divisor = divisor.to(mask.dtype)
    count = torch.round(valid_share * divisor)
    if c.count_include_pad:
        with_padding = per_sample([window.with_padding(box) for window, box in along], self)
        count = count + (with_padding - per_sample([window.elements(box) for window, box in along], self))
    data = average(self.filled(0).to(mask.dtype))
    mean = data * divisor / torch.where(as_bool(validity), count, 1).to(mask.dtype)
    if not self.dtype.is_floating_point:
        mean = whole(mean)
    return Dense(mean.to(self.dtype), validity, found.extent)


@masked_rule(*pooling.max_pool.ops, category=POOLING, takes_call=True, torch_if_valid=True, register=within_samples)
def max_pool(c: Bound) -> Any:
    """The maxima by the rules for missing values; their indices refer to the batch."""
    self, spatial = c.self, spatial_dims(c.op)
    result = pooling.maximum(c.op, *c.named.values())
    first = result if isinstance(result, Dense) else result[0]
    assert first.validity is not None
    windows = pooling_windows(c, first.shape[-spatial:])
    along = list(zip(windows, crops(self, spatial), strict=True))

    found = cropped_result(first.data, along, self, first.validity)
    return found if isinstance(result, Dense) else (found, Dense(result[1].data, found.validity, found.extent))


def in_bins(data: Tensor, x: Dense, validity: Tensor, spatial: int) -> Dense:
    """A result of adaptive pooling, whose bins are all there."""
    others = extents.without(x, range(x.ndim - spatial, x.ndim))
    return extents.finished(extents.with_factors(Dense(data, validity), others, padded=False, grows=False))


@masked_rule(
    *pooling.adaptive_avg_pool.ops, category=POOLING, takes_op=True, torch_if_valid=True, register=within_samples
)
def adaptive_avg_pool(op: OpOverload, self: Dense, output_size: Sizes) -> Dense:
    """The mean of the valid elements of each bin of the sample's box."""
    spatial = spatial_dims(op)
    mask = numeric_validity(self, spatial)
    total, count = self.filled(0).to(mask.dtype), mask
    if self.ndim == spatial + 1:
        total, count = total.unsqueeze(0), count.unsqueeze(0)
    for d, (box, out) in enumerate(zip(crops(self, spatial), per_dim(output_size, spatial), strict=True)):
        index, inside = adaptive_bins(box, out)
        total = gather_bins(total, 2 + d, index, inside, 0).sum(-1)
        count = gather_bins(count, 2 + d, index, inside, 0).sum(-1)
    mean = total / torch.where(count > 0, count, 1)
    if self.ndim == spatial + 1:
        mean, count = mean.squeeze(0), count.squeeze(0)
    if not self.dtype.is_floating_point:
        mean = whole(mean)
    return in_bins(mean.to(self.dtype), self, as_int8(count > 0), spatial)


@masked_rule(
    *pooling.adaptive_max_pool.ops, category=POOLING, takes_op=True, torch_if_valid=True, register=within_samples
)
def adaptive_max_pool(op: OpOverload, self: Dense, output_size: Sizes) -> tuple[Dense, Dense]:
    """The greatest valid element of each bin of the sample's box, and its index in a plane of the batch."""
    spatial = spatial_dims(op)
    data, valid = self.filled(lowest(self.dtype)), numeric_validity(self, spatial)
    if self.ndim == spatial + 1:
        data, valid = data.unsqueeze(0), valid.unsqueeze(0)
    sizes = data.shape[2:]
    position = torch.arange(math.prod(sizes), device=data.device).reshape(sizes).expand(data.shape)
    for d, (box, out) in enumerate(zip(crops(self, spatial), per_dim(output_size, spatial), strict=True)):
        index, inside = adaptive_bins(box, out)
        data, chosen = gather_bins(data, 2 + d, index, inside, lowest(self.dtype)).max(-1)
        position = gather_bins(position, 2 + d, index, inside, 0).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        valid = gather_bins(valid, 2 + d, index, inside, 0).amax(-1)
    if self.ndim == spatial + 1:
        data, position, valid = data.squeeze(0), position.squeeze(0), valid.squeeze(0)
    validity = as_int8(valid > 0)
    return in_bins(data, self, validity, spatial), in_bins(position, self, validity, spatial)


# ------------------------------------------------------------------------------------------------------------- refusals


@masked_rule(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten._pad_circular.default,
    aten.fractional_max_pool2d.default,
    aten.fractional_max_pool3d.default,
    category=MOVEMENT,
    takes_op=True,
    register=when_padding,
)
def reads_beyond_the_box(op: OpOverload, self: Dense, *arguments: Any) -> Any:
    """Refused unless all is valid: these operators read up to the end of the batch, not of the sample."""
    if self.validity is None:
        return map_tensors(
            Dense, op(self.data, *(a.filled(0) if isinstance(a, Dense) else a for a in arguments)), Tensor
        )
    raise MaskedSemanticsError(
        f"{packet_name(op)} of a partly valid tensor of shape {tuple(self.shape)} has no meaning inside "
        "masked_dispatch.windows('padding'): it reads up to the end of the batch, not up to the end of each "
        "sample. Apply it to each sample before they are padded to a batch, use zero padding (padding= of the "
        "convolution), or fill it first with x.to_tensor(value)."
    )
