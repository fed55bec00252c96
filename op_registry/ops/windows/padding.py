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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry import extents
from op_registry.authoring import (
    CONTRACTION,
    MOVEMENT,
    POOLING,
    Bound,
    Dense,
    MaskedSemanticsError,
    Number,
    Rule,
    aligned_validity,
    as_bool,
    as_int8,
    intersect,
    lowest,
    masked_rule,
    packet_name,
)
from op_registry.ops.windows import convolution, pooling
from op_registry.ops.windows.convolution import per_dim
from op_registry.ops.windows.pooling import averaged, numeric_validity, spatial_dims, whole
from op_registry.records.dense import map_tensors

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
    batch = [whole_of(self, d, spatial) for d in range(-spatial, 0)]
    counted = Geometry.with_padding if c.count_include_pad else Geometry.elements
    divisor = per_sample([counted(window, whole) for window, whole in zip(windows, batch, strict=True)])
    divisor = divisor.to(mask.dtype)
    count = torch.round(valid_share * divisor)
    if c.count_include_pad:
        with_padding = per_sample([window.with_padding(box) for window, box in along])
        count = count + (with_padding - per_sample([window.elements(box) for window, box in along]))
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
    for d, (box, out) in enumerate(zip(crops(self, spatial), per_dim(output_size, spatial), strict=True), -spatial):
        index, inside = adaptive_bins(box, out)
        total = gather_bins(total, d, index, inside, 0).sum(-1)
        count = gather_bins(count, d, index, inside, 0).sum(-1)
    mean = total / torch.where(count > 0, count, 1)
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
    sizes = data.shape[-spatial:]
    position = torch.arange(math.prod(sizes), device=data.device).reshape(sizes).expand(data.shape)
    for d, (box, out) in enumerate(zip(crops(self, spatial), per_dim(output_size, spatial), strict=True), -spatial):
        index, inside = adaptive_bins(box, out)
        data, chosen = gather_bins(data, d, index, inside, lowest(self.dtype)).max(-1)
        position = gather_bins(position, d, index, inside, 0).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        valid = gather_bins(valid, d, index, inside, 0).amax(-1)
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


# ---------------------------------------------------------- samples cropped to the bounding box of their valid elements

# A crop consists, for each windowed dimension, of the first index and the length of each sample's box. All tensors here
# begin with the dimensions before the windows, of size 1 where all share a box. The box of a sample without valid
# elements has length 0.


@dataclass(frozen=True)
class Crop:
    """Each sample's box along one dimension.

    start, length  (*lead,) int64: of the dimensions before the windows
    size           of the dimension in the batch
    """

    start: Tensor
    length: Tensor
    size: int

    @property
    def stop(self) -> Tensor:
        return self.start + self.length


def whole_of(x: Dense, dim: int, spatial: int) -> Crop:
    """All of a dimension of windows, counted from the last."""
    start = torch.zeros([1] * (x.ndim - spatial), dtype=torch.int64, device=x.device)
    return Crop(start, start + x.shape[dim], x.shape[dim])


def crops(x: Dense, spatial: int) -> list[Crop]:
    """The box of each sample of (…, C, *spatial), over all channels, by dimension.

    The box of a tensor that knows which positions are there is that of these; of others, of the valid elements.
    """
    if x.extent is not None:
        return [crop_of_extent(x, d, spatial) for d in range(-spatial, 0)]
    valid = aligned_validity(x)
    assert valid is not None
    valid = as_bool(valid).expand(*valid.shape[:-spatial], *x.shape[-spatial:]).any(-spatial - 1, keepdim=True)
    others = [[d for d in range(-spatial, 0) if d != dim] for dim in range(-spatial, 0)]
    return [_box(valid.any(dims) if dims else valid) for dims in others]


def crop_of_extent(x: Dense, dim: int, spatial: int) -> Crop:
    """The positions that are there along one dimension, counted from the last, which follow one another."""
    there = extents.along_dim(x, dim)
    if there is None:
        return whole_of(x, dim, spatial)
    others = [d for d in range(-spatial, 0) if d != dim]
    if any(there.shape[d] != 1 for d in others):
        raise MaskedSemanticsError(
            f"windows along dimension {x.ndim + dim} of a tensor of shape {tuple(x.shape)}: which positions of it are "
            "there depends on other dimensions of the windows, so that the samples are no boxes. Treat what is not "
            "there as missing values instead, x.without_extent()."
        )
    return _box(as_bool(there).squeeze(others) if others else as_bool(there))


def _box(along: Tensor) -> Crop:
    """From the first to the last index of each sample, of a bool (*lead, size)."""
    size = along.shape[-1]
    if not size:
        return Crop(along.sum(-1), along.sum(-1), size)
    index = torch.arange(size, device=along.device)
    first = torch.where(along, index, size).amin(-1)
    last = torch.where(along, index, -1).amax(-1)
    return Crop(torch.where(last < 0, 0, first), torch.where(last < 0, 0, last - first + 1), size)


def cropped_result(data: Tensor, along: Along, x: Dense, valid: Tensor | None) -> Dense:
    """A result of windows over crops, valid as `crop_validity` says, with the extent of the crops' results."""
    validity = as_int8(crop_validity(along, x, valid))
    if x.extent is None:
        return Dense(data, validity)
    lead = x.ndim - len(along)
    factors = list(extents.without(x, range(lead, x.ndim)))
    for d, (window, box) in enumerate(along):
        dim = lead + d
        own = [f for f in extents.factors_of(x) if f.along[dim] is not None]
        if own:
            known, after = extents.first_known(own), as_int8(placed(window.of_crop(box), d, len(along)))
            numbered = numbered_after(x, dim, window, after, known[dim])
            factors.append(extents.Factor(known, after).knowing(dim, numbered))
    return extents.finished(extents.with_factors(Dense(data, validity), factors, padded=False, grows=False))


def placed(along: Tensor, window: int, windows: int) -> Tensor:
    """A tensor (*lead, out), of one of several dimensions of windows, in the dimensions of the result."""
    out = along.shape[-1]
    return along.reshape(*along.shape[:-1], *(out if d == window else 1 for d in range(windows)))


def numbered_after(x: Dense, dim: int, window: Geometry | TransposedGeometry, after: Tensor, along: Any) -> Any:
    """What is known of a dimension of positions after windows, of which samples have those of `after`."""
    before, numbered = extents.along_dim(x, dim), extents.as_positions(along)
    assert before is not None
    if extents.keeps_all(before, dim, after, window.count, f"{window} along dimension {dim - x.ndim}"):
        return numbered
    return extents.maybe_empty(numbered)


def per_sample(along: Sequence[Tensor]) -> Tensor:
    """The outer product of tensors (*lead, out), one for each dimension of the windows: (*lead, *out)."""
    product, *others = (placed(t, window, len(along)) for window, t in enumerate(along))
    for part in others:
        product = product & part if product.dtype is torch.bool else product * part
    return product


@dataclass(frozen=True)
class Geometry:
    """The windows along one dimension.

    out       number of windows in the batch
    before    padding before the first element
    after     padding after the last
    by_ceil   whether the number of windows is rounded up, as in pooling with ceil_mode
    """

    out: int
    kernel: int
    stride: int
    before: int
    after: int
    dilation: int = 1
    by_ceil: bool = False

    def __str__(self) -> str:
        return f"a window of {self.dilation * (self.kernel - 1) + 1}"

    def count(self, length: int) -> int:
        """How many windows a sample of this length has, by torch's size formula."""
        room = length + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        count = (room + (self.stride - 1 if self.by_ceil else 0)) // self.stride + 1
        return count - (self.by_ceil and (count - 1) * self.stride >= length + self.before)

    def taps(self, device: torch.device) -> Tensor:
        """(out, kernel): the index that each tap of each window reads, in padding too."""
        first = torch.arange(self.out, device=device) * self.stride - self.before
        return first[:, None] + torch.arange(self.kernel, device=device) * self.dilation

    def of_crop(self, crop: Crop) -> Tensor:
        """(*lead, out) bool: the windows that torch's size formula gives the crop.

        If a box begins between two strides, these are the batch's windows that lie within the padded crop.
        """
        room = crop.length + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if self.by_ceil:
            count = torch.div(room + self.stride - 1, self.stride, rounding_mode="floor") + 1
            # The last window has to begin in the crop or in the padding before it.
            count = count - ((count - 1) * self.stride >= crop.length + self.before).to(count.dtype)
            room = torch.maximum(room, (count - 1) * self.stride)
        first = torch.arange(self.out, device=crop.start.device) * self.stride
        begins, ends = crop.start[..., None], (crop.start + room)[..., None]
        return (first >= begins) & (first <= ends) & (crop.length > 0)[..., None]

    def elements(self, crop: Crop) -> Tensor:
        """(*lead, out): how many taps of each window are in the box."""
        return self._count(crop.start, crop.stop, crop)

    def with_padding(self, crop: Crop) -> Tensor:
        """(*lead, out): how many are in the box or in the crop's own padding."""
        return self._count(crop.start - self.before, crop.stop + self.after, crop)

    def _count(self, low: Tensor, high: Tensor, crop: Crop) -> Tensor:
        taps = self.taps(crop.start.device)
        inside = (taps >= low[..., None, None]) & (taps < high[..., None, None])
        return inside.sum(-1)


@dataclass(frozen=True)
class TransposedGeometry:
    """The windows of a transposed convolution along one dimension."""

    out: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    output_padding: int

    def __str__(self) -> str:
        return f"a padding of {self.padding}"

    def count(self, length: int) -> int:
        """How many outputs a sample of this length has, by torch's size formula."""
        span = self.dilation * (self.kernel - 1) + self.output_padding - 2 * self.padding
        return (length - 1) * self.stride + span + 1

    def of_crop(self, crop: Crop) -> Tensor:
        """(*lead, out) bool: the outputs that torch's size formula gives the crop."""
        first = crop.start * self.stride
        span = self.dilation * (self.kernel - 1) + self.output_padding - 2 * self.padding
        count = (crop.length - 1) * self.stride + span + 1
        index = torch.arange(self.out, device=crop.start.device)
        return (index >= first[..., None]) & (index < (first + count)[..., None]) & (crop.length > 0)[..., None]

    def elements(self, crop: Crop) -> Tensor:
        """(*lead, out): how many elements of the box each output reads; 0 in the gaps between strides."""
        position = torch.arange(self.out, device=crop.start.device)[:, None] + self.padding
        source = position - torch.arange(self.kernel, device=crop.start.device) * self.dilation
        index = torch.div(source, self.stride, rounding_mode="floor")
        reads = (source >= 0) & (source % self.stride == 0)
        inside = (index >= crop.start[..., None, None]) & (index < crop.stop[..., None, None]) & reads
        return inside.sum(-1)


# The windows along each dimension, with the box of each sample there.
Along = Sequence[tuple[Geometry | TransposedGeometry, Crop]]


def crop_validity(along: Along, x: Dense, valid: Tensor | None) -> Tensor:
    """(*lead, *out) bool: the valid outputs.

    torch's size formula gives the crop such an output, and one of its taps is `valid` or none is in the box. `valid` is
    None if every tap in a box is valid.
    """
    of_crop = per_sample([window.of_crop(box) for window, box in along])
    if valid is None:
        return of_crop
    nothing_read = per_sample([window.elements(box) for window, box in along]) == 0
    return of_crop & (as_bool(valid) | nothing_read)


# -------------------------------------------------------------------------------------------------------- adaptive bins


def adaptive_bins(crop: Crop, out: int) -> tuple[Tensor, Tensor]:
    """The bins of adaptive pooling of each sample's box: indices into the batch, and which of them belong to the bin.

    (*lead, out, widest) int64 and bool
    """
    widest = math.ceil(crop.size / out) + 1
    number = torch.arange(out, device=crop.start.device)
    length = crop.length[..., None]
    first = torch.div(number * length, out, rounding_mode="floor")
    last = -torch.div(-(number + 1) * length, out, rounding_mode="floor")
    offset = torch.arange(widest, device=crop.start.device)
    inside = offset < (last - first)[..., None]
    index = crop.start[..., None, None] + first[..., None] + offset
    return torch.where(inside, index, 0), inside


def gather_bins(t: Tensor, dim: int, index: Tensor, inside: Tensor, outside: Number) -> Tensor:
    """`t` (*lead, …) read along `dim`, counted from the last, at (*lead, out, widest); `outside` where an index doesn't
    belong to the bin.

    `dim` becomes `out`, and the elements of a bin are added as the last dimension.
    """
    *lead, out, widest = index.shape
    moved = t.movedim(dim, -1)
    aligned = (*lead, *[1] * (moved.ndim - 1 - len(lead)), out * widest)
    sizes = torch.broadcast_shapes(moved.shape[:-1], aligned[:-1])
    read = moved.expand(*sizes, -1).gather(-1, index.reshape(aligned).expand(*sizes, -1))
    return torch.where(inside.reshape(aligned), read, outside).unflatten(-1, (out, widest)).movedim(-2, dim - 1)
