"""Interpolation.

Law: the weighted mean of the valid elements, valid where one of them has a non-zero weight. Nearest-neighbour
interpolation moves an element with its validity; linear interpolation is renormalised by the weight of the valid
elements. Bicubic and antialiasing weights may be negative, so a part of them gives no mean: there, every element with a
non-zero weight must be valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from op_registry.authoring import POOLING, Dense, as_int8, masked_rule, packet_name
from op_registry.ops.windows.pooling import averaged, numeric_validity, spatial_dims

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
