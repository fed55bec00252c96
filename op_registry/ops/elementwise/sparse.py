"""Cross product, trapezoids, trace and glu on sparse storage, composed of operators that have lowerings."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    Bound,
    Dense,
    NotLowered,
    Sparse,
    broadcast_to,
    call,
    call_broadcast,
    on_call,
    one_element_but_along,
    raise_error_of_torch,
    shape_alone,
    slice_of,
    to_dense,
    wrap_dim,
)
from op_registry.ops.elementwise import differences

aten = torch.ops.aten


@differences.trace.lowering(Sparse)
@on_call
def trace(c: Bound) -> Any:
    aten.trace(torch.empty((1,) * c.self.ndim, dtype=c.self.dtype))  # raises torch's errors
    return call(aten.sum.default, call(aten.diagonal.default, c.self))


@differences.linalg_cross.lowering(Sparse)
def linalg_cross(op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, *, dim: int = -1) -> Any:
    shape = op(*(shape_alone(r.shape) for r in (x, y)), dim=dim).shape
    x, y = (broadcast_to(r, shape) if isinstance(r, Sparse) else r.map(lambda t: t.expand(shape)) for r in (x, y))

    def shifted(record: Dense | Sparse, shift: int) -> Any:
        return call(aten.roll.default, record, [-shift], [dim])

    minuend = call(aten.mul.Tensor, shifted(x, 1), shifted(y, 2))
    return call(aten.sub.Tensor, minuend, call(aten.mul.Tensor, shifted(x, 2), shifted(y, 1)))


@differences.trapezoid_dx.lowering(Sparse)
@on_call(floats="y", elements=True)
def trapezoid_dx(c: Bound) -> Dense:
    total = to_dense(call(aten.sum.dim_IntList, _heights(c), [c.dim]))
    return Dense(total.data * (c.dx / 2), total.validity)


@differences.trapezoid_x.lowering(Sparse)
@on_call(sparse="y", floats="y", elements=True)
def trapezoid_x(c: Bound) -> Dense:
    x, y, dim, heights = c.x, c.y, c.dim, _heights(c)
    if x.ndim == 1:
        width = call_broadcast(aten.sub.Tensor, slice_of(x, 0, 1, x.shape[0]), slice_of(x, 0, 0, x.shape[0] - 1))
        width = to_dense(width)  # one number for each interval: small
        sizes_along_dim = [-1 if d == dim % y.ndim else 1 for d in range(y.ndim)]
        width = width.map(lambda t: t.reshape(sizes_along_dim))
    else:
        last = wrap_dim(dim, y.ndim) - y.ndim  # counted from the last one, as they broadcast
        width = call_broadcast(
            aten.sub.Tensor, slice_of(x, last, 1, x.shape[last]), slice_of(x, last, 0, x.shape[last] - 1)
        )
    total = to_dense(call(aten.sum.dim_IntList, call_broadcast(aten.mul.Tensor, heights, width), [dim]))
    return Dense(total.data / 2, total.validity)


def _heights(c: Bound) -> Any:
    """For each interval the sum of the heights at its ends."""
    raise_error_of_torch(c)
    y, dim = c.y, c.dim
    if y.shape[dim] < 2:
        raise NotLowered("it has no interval along its dimension: torch's result reads every element")
    return call(aten.add.Tensor, slice_of(y, dim, 0, y.shape[dim] - 1), slice_of(y, dim, 1, y.shape[dim]))


@on_call
def glu(c: Bound) -> Any:
    self, dim = c.self, c.dim
    aten.glu(shape_alone(one_element_but_along(self.shape, dim)), dim)  # raises torch's errors for the shape
    aten.glu(torch.empty(2, dtype=self.dtype))  # and for the dtype
    half = self.shape[dim] // 2
    gate = call(aten.sigmoid.default, slice_of(self, dim, half, 2 * half))
    return call(aten.mul.Tensor, slice_of(self, dim, 0, half), gate)
