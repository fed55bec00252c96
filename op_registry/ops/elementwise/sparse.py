"""Differences and gates on sparse storage, composed of operators that keep elements where they are stored."""

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
    dense_or_none,
    refuse_permuted,
    slice_of,
)
from op_registry.ops.elementwise import differences

aten = torch.ops.aten


@differences.trace.lowering(Sparse)
def trace(op: OpOverload, x: Any) -> Any:
    op(torch.empty(x.shape, device="meta"))  # raises torch's errors
    if x.dtype is torch.bool:
        raise NotLowered("torch refuses its dtype")
    return call(aten.sum.default, call(aten.diagonal.default, x))


@differences.linalg_cross.lowering(Sparse)
def linalg_cross(op: OpOverload, x: Any, y: Any, *, dim: int = -1) -> Any:
    shape = op(*(torch.empty(r.shape, dtype=r.dtype, device="meta") for r in (x, y)), dim=dim).shape
    refuse_permuted(x, y)
    x, y = (broadcast_to(r, shape) if isinstance(r, Sparse) else r.map(lambda t: t.expand(shape)) for r in (x, y))

    def shifted(record: Any, places: int) -> Any:
        return call(aten.roll.default, record, [-places], [dim])

    ahead = call(aten.mul.Tensor, shifted(x, 1), shifted(y, 2))
    return call(aten.sub.Tensor, ahead, call(aten.mul.Tensor, shifted(x, 2), shifted(y, 1)))


@differences.trapezoid_dx.lowering(Sparse)
def trapezoid_dx(op: OpOverload, y: Any, *, dx: Number = 1, dim: int = -1) -> Any:
    heights = _heights(y, dim)
    total = dense_or_none(call(aten.sum.dim_IntList, heights, [dim]))
    return Dense(total.data * (dx / 2), total.validity)


@differences.trapezoid_x.lowering(Sparse)
def trapezoid_x(op: OpOverload, y: Any, x: Any, *, dim: int = -1) -> Any:
    heights = _heights(y, dim)
    if x.ndim == 1:
        width = call_broadcast(aten.sub.Tensor, slice_of(x, 0, 1, x.shape[0]), slice_of(x, 0, 0, x.shape[0] - 1))
        width = dense_or_none(width)  # a line
        laid = [-1 if d == dim % y.ndim else 1 for d in range(y.ndim)]
        width = width.map(lambda t: t.reshape(laid))
    elif x.ndim == y.ndim:
        width = call_broadcast(
            aten.sub.Tensor, slice_of(x, dim, 1, x.shape[dim]), slice_of(x, dim, 0, x.shape[dim] - 1)
        )
    else:
        raise NotLowered("its points have dimensions of their own")
    total = dense_or_none(call(aten.sum.dim_IntList, call_broadcast(aten.mul.Tensor, heights, width), [dim]))
    return Dense(total.data / 2, total.validity)


def _heights(y: Any, dim: int) -> Any:
    if not isinstance(y, Sparse) or not -y.ndim <= dim < y.ndim or y.shape[dim] < 2 or not y.dtype.is_floating_point:
        raise NotLowered("its heights are stored densely, or there is no interval, or it is computed in another dtype")
    return call(aten.add.Tensor, slice_of(y, dim, 0, y.shape[dim] - 1), slice_of(y, dim, 1, y.shape[dim]))


def glu(op: OpOverload, self: Any, dim: int = -1) -> Any:
    aten.glu(torch.empty(self.shape, device="meta"), dim)  # raises torch's errors
    if not self.dtype.is_floating_point:
        raise NotLowered("torch refuses its dtype")
    half = self.shape[dim] // 2
    gate = call(aten.sigmoid.default, slice_of(self, dim, half, 2 * half))
    return call(aten.mul.Tensor, slice_of(self, dim, 0, half), gate)
