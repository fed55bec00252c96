"""The sums inside F.lp_pool1d, 2d and 3d.

Law: the sum over the valid elements of the window. torch averages the powers and multiplies by the size of a whole
window, to get their sum. So here, the average is the sum of the valid elements, divided by the number that torch
divides by when all are valid: the number of elements that the window has in the tensor, or in the sample's box if the
mask marks padding, or the tensor knows which of its positions are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry import extents
from op_registry.authoring import POOLING, Bound, Dense, by_rule, inside
from op_registry.ops.windows import padding as padding_of_samples
from op_registry.ops.windows.convolution import Sizes, per_dim
from op_registry.ops.windows.padding import crops, per_sample
from op_registry.ops.windows.pooling import spatial_dims
from op_registry.registry import registry

aten = torch.ops.aten


@inside(torch.nn.functional.lp_pool1d, aten.avg_pool1d.default, category=POOLING)
def lp_pool1d(
    self: Dense, kernel_size: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil_mode: bool = False
) -> Dense:
    """The sum of the window's valid elements, divided by what torch multiplies it with afterwards."""
    kernel, step, edge = (1, *kernel_size), (1, *(stride or kernel_size)), (0, *padding)
    share = share_of_window(aten.avg_pool2d.default, with_row(self), kernel, step, edge, ceil_mode)
    return without_row(share)


@inside(torch.nn.functional.lp_pool2d, aten.avg_pool2d.default, category=POOLING)
def lp_pool2d(self: Dense, kernel_size: Sizes, *window: Any) -> Dense:
    """The sum of the window's valid elements, divided by what torch multiplies it with afterwards."""
    return share_of_window(aten.avg_pool2d.default, self, kernel_size, *window)


@inside(torch.nn.functional.lp_pool3d, aten.avg_pool3d.default, category=POOLING)
def lp_pool3d(self: Dense, kernel_size: Sizes, *window: Any) -> Dense:
    """The sum of the window's valid elements, divided by what torch multiplies it with afterwards."""
    return share_of_window(aten.avg_pool3d.default, self, kernel_size, *window)


def share_of_window(
    op: OpOverload, x: Dense, kernel_size: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil_mode: bool = False
) -> Dense:
    """The sum of each window's valid elements, divided by the window's size when all are valid."""
    spatial = spatial_dims(op)
    window = (*(per_dim(sizes, spatial) for sizes in (kernel_size, stride, padding)), ceil_mode, True, 1)
    rule = registry.get(op)
    if x.extent is not None or (x.validity is not None and rule and rule.run is padding_of_samples.avg_pool.run):
        total: Dense = padding_of_samples.avg_pool.bind(op)(x, *window)
        c = Bound.of(None, op, (x, *window), {})
        along = padding_of_samples.pooling_windows(c, total.shape[-spatial:])
        boxes = crops(x, spatial)
        count = per_sample([w.with_padding(box) for w, box in zip(along, boxes, strict=True)])
        sizes = torch.where(count > 0, count, 1).to(x.dtype)  # a window beyond the box has no elements, and is invalid
    else:
        total = by_rule(op, x, *window)
        sizes = op(torch.ones((1, *x.shape[-spatial:]), dtype=x.dtype, device=x.device), *window)
    return Dense(total.data / sizes, total.validity, total.extent)


def with_row(x: Dense) -> Dense:
    """The same elements in two dimensions of windows, of which the first has size 1."""
    row = x.map(lambda t: t.unsqueeze(-2))
    if x.extent is None:
        return row
    factors = [f.moved((*f.along[:-1], None, f.along[-1]), lambda t: t.unsqueeze(-2)) for f in extents.factors_of(x)]
    return extents.finished(extents.with_factors(row, factors, x.extent.is_mask, grows=False))


def without_row(x: Dense) -> Dense:
    line = x.map(lambda t: t.squeeze(-2))
    if x.extent is None:
        return line
    factors = [f.moved((*f.along[:-2], f.along[-1]), lambda t: t.squeeze(-2)) for f in extents.factors_of(x)]
    return extents.finished(extents.with_factors(line, factors, x.extent.is_mask, grows=False))


extents.WITHIN_SAMPLES.update({rule: rule for rule in (lp_pool1d, lp_pool2d, lp_pool3d)})
