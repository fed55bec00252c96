"""Sampling at grid points: torch.nn.functional.grid_sample and its kernels.

Law: the sum over the valid taps of a grid point, times (weight of all taps inside the input) / (weight of the valid
ones), as in interpolation. With 'zeros', taps outside are padding, which counts in neither weight. Bicubic weights may
be negative, so a part of them gives no mean: there, every tap inside with a weight must be valid. The result is valid
if the grid point is, and if a tap with a weight is valid or no tap lies inside (where torch gives 0).

torch's kernel runs on the filled data, on the mask and on ones. So we use its weights, and they are differentiable in
the grid.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    POOLING,
    Dense,
    Equation,
    as_bool,
    as_int8,
    by_rule,
    intersect,
    masked_rule,
)
from op_registry.ops.windows.pooling import numeric_validity

aten = torch.ops.aten

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
