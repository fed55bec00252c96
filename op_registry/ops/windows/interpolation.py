"""Interpolation.

Law: the weighted mean of what is valid, valid where something of non-zero weight is: the nearest element moves with
its validity, and a linear interpolation is renormalised by the weight of what is valid. Bicubic and antialiasing
weights may be negative, so that a part of them says nothing: there every element with a weight has to be valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import POOLING, Dense, as_int8, masked_rule, packet_name
from op_registry.ops.windows.pooling import averaged, shares, spatial_dims

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
# Not every torch that we support has the last one.
EVERY = tuple(
    getattr(aten, name)
    for name in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa")
    if hasattr(aten, name)
)


def defaults(packets: Sequence[Any]) -> list[OpOverload]:
    return [packet.default for packet in packets]


@masked_rule(*defaults(NEAREST), category=POOLING, takes_op=True)
def upsample_nearest(op: OpOverload, self: Dense, output_size: Sequence[int], *scales: float | None) -> Dense:
    data = op(self.data, output_size, *scales)
    if self.validity is None:
        return Dense(data)
    return Dense(data, as_int8(op(shares(self, spatial_dims(op)), output_size, *scales) != 0))


@masked_rule(*defaults(LINEAR), category=POOLING, takes_op=True)
def upsample_linear(
    op: OpOverload, self: Dense, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Dense:
    def interpolate(x: Tensor) -> Any:
        return op(x, output_size, align_corners, *scales)

    return averaged(interpolate, self, spatial_dims(op), whole=torch.round)


@masked_rule(*defaults(EVERY), category=POOLING, takes_op=True)
def upsample_every(
    op: OpOverload, self: Dense, output_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Dense:
    """Valid where nothing invalid has a weight, which is told dimension by dimension."""
    data = op(self.filled(0), output_size, align_corners, *scales)
    if self.validity is None:
        return Dense(data)
    invalid = 1 - shares(self, 2)
    vertical, horizontal = scales or (None, None)

    def weighs(dim: int, scale: float | None) -> Tensor:
        """(in, out): 1 where an output has a weight on an input, as far as one dimension is concerned."""
        size = invalid.shape[dim]
        basis = torch.eye(size, dtype=invalid.dtype, device=invalid.device)[None, None]
        found = op(basis, [size, output_size[dim]], align_corners, None, scale)
        # Rounding leaves dust where there is no weight.
        return (found[0, 0].abs() > 1e-6).to(invalid.dtype)

    missed = torch.matmul(weighs(-2, vertical).T, torch.matmul(invalid, weighs(-1, horizontal)))
    return Dense(data, as_int8(missed < 0.5))


WITH_VEC = {
    packet.vec: rule
    for rule, packets in ((upsample_nearest, NEAREST), (upsample_linear, LINEAR), (upsample_every, EVERY))
    for packet in packets
}


@masked_rule(*WITH_VEC, category=POOLING, takes_op=True)
def upsample_vec(op: OpOverload, input: Dense, output_size: Sequence[int] | None, *options: Any) -> Any:
    """What torch.nn.functional calls: an output size, or scale factors for it, which come last."""
    *align_corners, factors = options
    default = getattr(aten, packet_name(op)).default
    run = WITH_VEC[op].bind(default)
    if output_size is not None:
        return run(input, output_size, *align_corners)
    spatial = spatial_dims(op)
    sizes = [math.floor(n * f) for n, f in zip(input.shape[-spatial:], factors, strict=True)]
    return run(input, sizes, *align_corners, *factors)
