"""Cross product, trapezoids and trace. (diff, gradient and cumulative_trapezoid are served by their decompositions.)

Law: elementwise on the elements that an output reads. A component of a cross product is valid where the four components
that it reads are. A trapezoid sums the intervals whose end points are both valid, and is valid as a reduction is: with
at least one such interval, or if there is no interval at all. A trace is a sum over the diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ELEMENTWISE,
    REDUCTION,
    Along,
    Dense,
    Equation,
    Number,
    all_valid,
    as_int8,
    fill_where_invalid,
    intersect,
    masked_rule,
    masked_slices,
)

aten = torch.ops.aten


@masked_slices(aten.linalg_cross, category=ELEMENTWISE, dims=Along("each"))
def linalg_cross(op: OpOverload, x: Dense, y: Dense, *, dim: int = -1) -> Dense:
    """Written out, so that a component and its derivatives depend on nothing but the four components that it reads."""
    shape = op(x.data.detach(), y.data.detach(), dim=dim).shape  # raises torch's errors too

    def shifted(record: Dense, shift: int) -> Dense:
        return record.map(lambda t: t.expand(shape).roll(-shift, dim))

    a, b, c, d = shifted(x, 1), shifted(y, 2), shifted(x, 2), shifted(y, 1)
    validity = intersect(intersect(a.validity, b.validity), intersect(c.validity, d.validity))
    p, q, r, s = (fill_where_invalid(record.data, validity, 0) for record in (a, b, c, d))
    return Dense(p * q - r * s, validity)


@masked_slices(aten.trace, category=REDUCTION, dims=Equation("mn->"))
def trace(op: OpOverload, x: Dense) -> Dense:
    """The sum over the valid elements of the diagonal."""
    return Dense(op(x.filled(0)), x.map(lambda t: t.diagonal()).any_valid())


# --------------------------------------------------------------------------------------------------------- trapezoids


@masked_rule(aten.trapezoid.x, aten.trapz.x, category=REDUCTION, dims=Along("reduced"))
def trapezoid_x(y: Dense, x: Dense, *, dim: int = -1) -> Dense:
    result = aten.trapezoid.x(y.filled(0), x.filled(0), dim=dim)  # reads even a single point
    if all_valid(y, x) or y.shape[dim] < 2:
        return Dense(result)
    heights, width = intervals(y, x, dim)
    return Dense((heights.data * width).sum(dim) / 2, heights.any_valid(dim))


@masked_rule(aten.trapezoid.dx, aten.trapz.dx, category=REDUCTION, dims=Along("reduced"))
def trapezoid_dx(y: Dense, *, dx: Number = 1, dim: int = -1) -> Dense:
    result = aten.trapezoid.dx(y.filled(0), dx=dx, dim=dim)
    if all_valid(y) or y.shape[dim] < 2:
        return Dense(result)
    heights, _ = intervals(y, None, dim)
    return Dense(heights.data.sum(dim) * (dx / 2), heights.any_valid(dim))


def intervals(y: Dense, x: Dense | None, dim: int) -> tuple[Dense, Tensor | Number]:
    """For each interval the sum of the heights at its ends, and its width; 0 where an end is invalid."""
    left, right = end_points(y, dim)
    validity = intersect(left.validity, right.validity)
    width: Tensor | Number = 1
    if x is not None:
        axis = dim % y.ndim
        if x.ndim == 1 and y.ndim > 1:
            shape = [-1 if d == axis else 1 for d in range(y.ndim)]
            x = x.map(lambda t: t.reshape(shape))
        elif x.ndim < y.ndim:
            shape = [1] * (y.ndim - x.ndim) + list(x.shape)
            x = x.map(lambda t: t.reshape(shape))
        start, end = end_points(x, dim)
        shape = list(torch.broadcast_shapes(left.shape, start.shape))
        width_validity = intersect(start.validity, end.validity)
        validity = intersect(expanded(validity, shape), expanded(width_validity, shape))
        width = fill_where_invalid(end.data, validity, 0) - fill_where_invalid(start.data, validity, 0)
    heights = fill_where_invalid(left.data, validity, 0) + fill_where_invalid(right.data, validity, 0)
    return Dense(heights, validity), width


def end_points(x: Dense, dim: int) -> tuple[Dense, Dense]:
    """The first point of every interval, and the last."""
    count = x.shape[dim] - 1
    return x.map(lambda t: t.narrow(dim, 0, count)), x.map(lambda t: t.narrow(dim, 1, count))


def expanded(validity: Tensor | None, shape: list[int]) -> Tensor | None:
    return None if validity is None else as_int8(validity).expand(shape)
