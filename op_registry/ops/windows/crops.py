"""Samples cropped to the bounding box of their valid elements, for windows over masks that mark padding.

A crop consists, for each windowed dimension, of the first index and the length of each sample's box. All tensors here
are (samples, …), with a single sample if all share a mask. The box of a sample without valid elements has length 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.authoring import (
    Dense,
    MaskedSemanticsError,
    Number,
    aligned_validity,
    as_bool,
    as_int8,
    extents,
)


@dataclass(frozen=True)
class Crop:
    """Each sample's box along one dimension.

    start, length  (samples,) int64
    size           of the dimension in the batch
    """

    start: Tensor
    length: Tensor
    size: int

    @property
    def stop(self) -> Tensor:
        return self.start + self.length


def crops(x: Dense, spatial: int) -> list[Crop]:
    """The box of each sample of (N, C, *spatial), over all channels, by dimension; (C, *spatial) is one sample.

    The box of a tensor that knows which positions are there is that of these; of others, of the valid elements.
    """
    if x.extent is not None:
        if x.ndim == spatial + 1 and any(factor.along[0] is not None for factor in extents.factors_of(x)):
            raise MaskedSemanticsError(
                f"windows over a tensor of shape {tuple(x.shape)} without a dimension of samples: which of its "
                "positions are there depends on its channels. Put the samples first, x.unsqueeze(1); or treat what is "
                "not there as missing values instead, x.without_extent()."
            )
        return [crop_of_extent(x, x.ndim - spatial + d, size) for d, size in enumerate(x.shape[-spatial:])]
    valid = aligned_validity(x)
    assert valid is not None
    sizes = x.shape[-spatial:]
    batched = as_bool(valid).expand(*valid.shape[:-spatial], *sizes)
    batched = (batched if x.ndim > spatial + 1 else batched.unsqueeze(0)).any(1)
    boxes = []
    for d in range(spatial):
        others = [1 + other for other in range(spatial) if other != d]
        along = batched.any(others) if others else batched
        boxes.append(_box(along))
    return boxes


def crop_of_extent(x: Dense, dim: int, size: int) -> Crop:
    """The positions that are there along one dimension, which follow one another."""
    there = extents.along_dim(x, dim)
    if there is None:
        everywhere = torch.zeros(1, dtype=torch.int64, device=x.device)
        return Crop(everywhere, everywhere + size, size)
    along = as_bool(there).movedim(dim, -1)
    if any(s != 1 for s in along.shape[1:-1]) or (along.shape[0] != 1 and dim == 0):
        raise MaskedSemanticsError(
            f"windows along dimension {dim} of a tensor of shape {tuple(x.shape)}: which positions of it are there "
            "depends on other dimensions than the first one, so that the samples are no boxes. Treat what is not there "
            "as missing values instead, x.without_extent()."
        )
    if along.ndim > 2:
        along = along.squeeze(tuple(range(1, along.ndim - 1)))
    return _box(along) if size else Crop(along.sum(1), along.sum(1), size)


def _box(along: Tensor) -> Crop:
    """From the first to the last index of each sample, of a bool (samples, size)."""
    size = along.shape[1]
    index = torch.arange(size, device=along.device)
    first = torch.where(along, index, size).amin(1)
    last = torch.where(along, index, -1).amax(1)
    return Crop(torch.where(last < 0, 0, first), torch.where(last < 0, 0, last - first + 1), size)


def cropped_result(data: Tensor, along: Along, x: Dense, valid: Tensor | None) -> Dense:
    """A result of windows over crops, valid as `crop_validity` says, with the extent of the crops' results."""
    validity = as_int8(crop_validity(along, x, valid))
    if x.extent is None:
        return Dense(data, validity)
    spatial = len(along)
    lead = x.ndim - spatial
    factors = list(extents.without(x, range(lead, x.ndim)))
    for d, (window, box) in enumerate(along):
        known = [f.along for f in extents.factors_of(x) if f.along[lead + d] is not None]
        if known:
            after = as_int8(placed(window.of_crop(box), x, lead + d, lead))
            numbered = numbered_after(x, lead + d, window, after, known[0][lead + d])
            factors.append(extents.Factor(known[0], after).knowing(lead + d, numbered))
    return extents.finished(extents.with_factors(Dense(data, validity), factors, padded=False, grows=False))


def placed(there: Tensor, x: Dense, dim: int, lead: int) -> Tensor:
    """A boolean (samples, out) in the dimensions of a result: the first, if it numbers samples, and `dim`."""
    shape = [1] * x.ndim
    shape[0 if lead > 1 else dim], shape[dim] = there.shape
    return there.reshape(shape)


def numbered_after(x: Dense, dim: int, window: Geometry | TransposedGeometry, after: Tensor, along: Any) -> Any:
    """What is known of a dimension of positions after windows, of which samples have those of `after`."""
    before, numbered = extents.along_dim(x, dim), extents.as_positions(along)
    assert before is not None
    if extents.keeps_all(before, dim, after, window.count, f"{window} along dimension {dim - x.ndim}"):
        return numbered
    return extents.maybe_empty(numbered)


def per_sample(along: Sequence[Tensor], x: Dense) -> Tensor:
    """The outer product of tensors (samples, out), one for each dimension: (samples, 1, *out), aligned with `x`'s data.

    It has no dimension of samples if `x` has none.
    """
    spatial = len(along)
    parts = [t.reshape(t.shape[0], 1, *(-1 if d == own else 1 for d in range(spatial))) for own, t in enumerate(along)]
    product = parts[0]
    for part in parts[1:]:
        product = product & part if product.dtype is torch.bool else product * part
    return product if x.ndim > spatial + 1 else product.squeeze(0)


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
        """(samples, out) bool: the windows that torch's size formula gives the crop.

        If a box begins between two strides, these are the batch's windows that lie within the padded crop.
        """
        room = crop.length + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if self.by_ceil:
            count = torch.div(room + self.stride - 1, self.stride, rounding_mode="floor") + 1
            # The last window has to begin in the crop or in the padding before it.
            count = count - ((count - 1) * self.stride >= crop.length + self.before).to(count.dtype)
            room = torch.maximum(room, (count - 1) * self.stride)
        first = torch.arange(self.out, device=crop.start.device) * self.stride
        begins, ends = crop.start[:, None], (crop.start + room)[:, None]
        return (first >= begins) & (first <= ends) & (crop.length > 0)[:, None]

    def elements(self, crop: Crop) -> Tensor:
        """(samples, out): how many taps of each window are in the box."""
        return self._count(crop.start, crop.stop, crop)

    def with_padding(self, crop: Crop) -> Tensor:
        """(samples, out): how many are in the box or in the crop's own padding."""
        return self._count(crop.start - self.before, crop.stop + self.after, crop)

    def _count(self, low: Tensor, high: Tensor, crop: Crop) -> Tensor:
        taps = self.taps(crop.start.device)
        inside = (taps >= low[:, None, None]) & (taps < high[:, None, None])
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
        """(samples, out) bool: the outputs that torch's size formula gives the crop."""
        first = crop.start * self.stride
        span = self.dilation * (self.kernel - 1) + self.output_padding - 2 * self.padding
        count = (crop.length - 1) * self.stride + span + 1
        index = torch.arange(self.out, device=crop.start.device)
        return (index >= first[:, None]) & (index < (first + count)[:, None]) & (crop.length > 0)[:, None]

    def elements(self, crop: Crop) -> Tensor:
        """(samples, out): how many elements of the box each output reads; 0 in the gaps between strides."""
        position = torch.arange(self.out, device=crop.start.device)[:, None] + self.padding
        source = position - torch.arange(self.kernel, device=crop.start.device) * self.dilation
        index = torch.div(source, self.stride, rounding_mode="floor")
        reads = (source >= 0) & (source % self.stride == 0)
        inside = (index >= crop.start[:, None, None]) & (index < crop.stop[:, None, None]) & reads
        return inside.sum(-1)


# The windows along each dimension, with the box of each sample there.
Along = Sequence[tuple[Geometry | TransposedGeometry, Crop]]


def crop_validity(along: Along, x: Dense, valid: Tensor | None) -> Tensor:
    """(samples, 1, *out) bool: the valid outputs.

    torch's size formula gives the crop such an output, and one of its taps is `valid` or none is in the box. `valid` is
    None if every tap in a box is valid.
    """
    of_crop = per_sample([window.of_crop(box) for window, box in along], x)
    if valid is None:
        return of_crop
    nothing_read = per_sample([window.elements(box) for window, box in along], x) == 0
    return of_crop & (as_bool(valid) | nothing_read)


# -------------------------------------------------------------------------------------------------------- adaptive bins


def adaptive_bins(crop: Crop, out: int) -> tuple[Tensor, Tensor]:
    """The bins of adaptive pooling of each sample's box: indices into the batch, and which of them belong to the bin.

    (samples, out, widest) int64 and bool
    """
    widest = math.ceil(crop.size / out) + 1
    number = torch.arange(out, device=crop.start.device)
    length = crop.length[:, None]
    first = torch.div(number * length, out, rounding_mode="floor")
    last = -torch.div(-(number + 1) * length, out, rounding_mode="floor")
    offset = torch.arange(widest, device=crop.start.device)
    inside = offset < (last - first)[..., None]
    index = crop.start[:, None, None] + first[..., None] + offset
    return torch.where(inside, index, 0), inside


def gather_bins(t: Tensor, dim: int, index: Tensor, inside: Tensor, outside: Number) -> Tensor:
    """`t` (N, C, …) read along `dim` at (samples, out, widest); `outside` where an index doesn't belong to the bin.

    `dim` becomes `out`, and the elements of a bin are added as the last dimension.
    """
    samples, out, widest = index.shape
    moved = t.movedim(dim, -1)
    aligned = (samples, *[1] * (moved.ndim - 2), out * widest)
    read = moved.gather(-1, index.reshape(aligned).expand(*moved.shape[:-1], out * widest))
    return torch.where(inside.reshape(aligned), read, outside).unflatten(-1, (out, widest)).movedim(-2, dim)
