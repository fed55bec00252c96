"""Differences of neighbours: cross, trapezoid, trace; diff, gradient and cumulative_trapezoid decompose rightly.

Law: elementwise on what is read. A component of a cross product is valid where the four that it reads are; a trapezoid
is the sum of the intervals whose ends are both valid, and valid as a reduction is: with at least one such interval, or
none to begin with. A trace is a sum over the diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    ELEMENTWISE,
    REDUCTION,
    Dense,
    Number,
    all_valid,
    as_int8,
    fill_where_invalid,
    intersect,
    masked_rule,
    masked_slices,
)

aten = torch.ops.aten


@masked_slices(aten.linalg_cross, category=ELEMENTWISE)
def linalg_cross(op: OpOverload, x: Dense, y: Dense, *, dim: int = -1) -> Dense:
    """Written out, so that what a component does not read reaches neither it nor its derivatives."""
    shape = op(x.data.detach(), y.data.detach(), dim=dim).shape  # and raises torch's errors

    def shifted(record: Dense, places: int) -> Dense:
        return record.map(lambda t: t.expand(shape).roll(-places, dim))

    a, b, c, d = shifted(x, 1), shifted(y, 2), shifted(x, 2), shifted(y, 1)
    validity = intersect(intersect(a.validity, b.validity), intersect(c.validity, d.validity))
    p, q, r, s = (fill_where_invalid(record.data, validity, 0) for record in (a, b, c, d))
    return Dense(p * q - r * s, validity)


@masked_slices(aten.trace, category=REDUCTION)
def trace(op: OpOverload, x: Dense) -> Dense:
    """The sum over what is valid of the diagonal."""
    return Dense(op(x.filled(0)), x.map(lambda t: t.diagonal()).any_valid())


# ------------------------------------------------------------------------------------------------------- trapezoids


@masked_rule(aten.trapezoid.x, aten.trapz.x, category=REDUCTION)
def trapezoid_x(y: Dense, x: Dense, *, dim: int = -1) -> Dense:
    result = aten.trapezoid.x(y.data, x.data, dim=dim)
    if all_valid(y, x) or y.shape[dim] < 2:
        return Dense(result)
    heights, width = intervals(y, x, dim)
    return Dense((heights.data * width).sum(dim) / 2, heights.any_valid(dim))


@masked_rule(aten.trapezoid.dx, aten.trapz.dx, category=REDUCTION)
def trapezoid_dx(y: Dense, *, dx: Number = 1, dim: int = -1) -> Dense:
    result = aten.trapezoid.dx(y.data, dx=dx, dim=dim)
    if all_valid(y) or y.shape[dim] < 2:
        return Dense(result)
    heights, _ = intervals(y, None, dim)
    return Dense(heights.data.sum(dim) * (dx / 2), heights.any_valid(dim))


def intervals(y: Dense, x: Dense | None, dim: int) -> tuple[Dense, Tensor | Number]:
    """Sums of neighbouring heights, valid where the interval's ends are, and the widths; 0 in invalid ones."""
    left, right = ends(y, dim)
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
        start, end = ends(x, dim)
        shape = list(torch.broadcast_shapes(left.shape, start.shape))
        both = intersect(start.validity, end.validity)
        validity = intersect(expanded(validity, shape), expanded(both, shape))
        width = fill_where_invalid(end.data, validity, 0) - fill_where_invalid(start.data, validity, 0)
    heights = fill_where_invalid(left.data, validity, 0) + fill_where_invalid(right.data, validity, 0)
    return Dense(heights, validity), width


def ends(x: Dense, dim: int) -> tuple[Dense, Dense]:
    """The first and the last points of all intervals."""
    count = x.shape[dim] - 1
    return x.map(lambda t: t.narrow(dim, 0, count)), x.map(lambda t: t.narrow(dim, 1, count))


def expanded(validity: Tensor | None, shape: list[int]) -> Tensor | None:
    return None if validity is None else as_int8(validity).expand(shape)
