"""Cross product, trapezoids, trace and glu on sparse storage, composed of operators that have lowerings."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Number,
    Sparse,
    broadcast_to,
    call,
    call_broadcast,
    one_element_but_along,
    shape_alone,
    slice_of,
    to_dense,
)
from op_registry.ops.elementwise import differences

aten = torch.ops.aten


@differences.trace.lowering(Sparse)
def trace(op: OpOverload, x: Sparse) -> Any:
    op(shape_alone(x.shape))  # raises torch's errors
    if x.dtype is torch.bool:
        raise NotLowered("torch refuses its dtype")
    return call(aten.sum.default, call(aten.diagonal.default, x))


@differences.linalg_cross.lowering(Sparse)
def linalg_cross(op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, *, dim: int = -1) -> Any:
    shape = op(*(shape_alone(r.shape) for r in (x, y)), dim=dim).shape
    x, y = (broadcast_to(r, shape) if isinstance(r, Sparse) else r.map(lambda t: t.expand(shape)) for r in (x, y))

    def shifted(record: Dense | Sparse, shift: int) -> Any:
        return call(aten.roll.default, record, [-shift], [dim])

    minuend = call(aten.mul.Tensor, shifted(x, 1), shifted(y, 2))
    return call(aten.sub.Tensor, minuend, call(aten.mul.Tensor, shifted(x, 2), shifted(y, 1)))


@differences.trapezoid_dx.lowering(Sparse)
def trapezoid_dx(op: OpOverload, y: Sparse, *, dx: Number = 1, dim: int = -1) -> Dense:
    heights = _heights(y, dim)
    total = to_dense(call(aten.sum.dim_IntList, heights, [dim]))
    return Dense(total.data * (dx / 2), total.validity)


@differences.trapezoid_x.lowering(Sparse)
def trapezoid_x(op: OpOverload, y: Dense | Sparse, x: Dense | Sparse, *, dim: int = -1) -> Dense:
    heights = _heights(y, dim)
    if x.ndim == 1:
        width = call_broadcast(aten.sub.Tensor, slice_of(x, 0, 1, x.shape[0]), slice_of(x, 0, 0, x.shape[0] - 1))
        width = to_dense(width)  # one number for each interval: small
        sizes_along_dim = [-1 if d == dim % y.ndim else 1 for d in range(y.ndim)]
        width = width.map(lambda t: t.reshape(sizes_along_dim))
    elif x.ndim == y.ndim:
        width = call_broadcast(
            aten.sub.Tensor, slice_of(x, dim, 1, x.shape[dim]), slice_of(x, dim, 0, x.shape[dim] - 1)
        )
    else:
        raise NotLowered("x is neither 1-d nor of as many dimensions as y")
    total = to_dense(call(aten.sum.dim_IntList, call_broadcast(aten.mul.Tensor, heights, width), [dim]))
    return Dense(total.data / 2, total.validity)


def _heights(y: Dense | Sparse, dim: int) -> Any:
    """For each interval the sum of the heights at its ends."""
    if not isinstance(y, Sparse) or not -y.ndim <= dim < y.ndim or y.shape[dim] < 2 or not y.dtype.is_floating_point:
        raise NotLowered("y is stored densely, has no interval along dim, or is not of a floating point dtype")
    return call(aten.add.Tensor, slice_of(y, dim, 0, y.shape[dim] - 1), slice_of(y, dim, 1, y.shape[dim]))


def glu(op: OpOverload, self: Sparse, dim: int = -1) -> Any:
    aten.glu(shape_alone(one_element_but_along(self.shape, dim)), dim)  # raises torch's errors
    if not self.dtype.is_floating_point:
        raise NotLowered("torch refuses its dtype")
    half = self.shape[dim] // 2
    gate = call(aten.sigmoid.default, slice_of(self, dim, half, 2 * half))
    return call(aten.mul.Tensor, slice_of(self, dim, 0, half), gate)
