"""Cross product, trapezoids and trace. (cumulative_trapezoid is served by its decomposition, and so are diff and
gradient but for batches that know which of their positions are there.)

Law: elementwise on the elements that an output reads. A component of a cross product is valid where the four components
that it reads are. A trapezoid sums the intervals whose end points are both valid, and is valid as a reduction is: with
at least one such interval, or if there is no interval at all. A trace is a sum over the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COMPOSITE,
    ELEMENTWISE,
    REDUCTION,
    Along,
    Bound,
    Dense,
    Equation,
    MaskedSemanticsError,
    NotLowered,
    Number,
    Permuted,
    Sparse,
    all_valid,
    as_int8,
    broadcast_to,
    call,
    fill_where_invalid,
    first_of,
    intersect,
    masked_rule,
    masked_slices,
    on_call,
    packet_name,
    raise_error_of_torch,
    shape_alone,
    to_dense,
    wrap_dim,
)
from op_registry.ops.elementwise import pointwise
from op_registry.records.arguments import one_element_but_along
from op_registry.sparse.on_values import ON_STORED_ROWS, call_broadcast, slice_of

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


@masked_rule(aten.trapezoid.x, aten.trapz.x, category=REDUCTION, dims=Along("reduced", size=2))
def trapezoid_x(y: Dense, x: Dense, *, dim: int = -1) -> Dense:
    result = aten.trapezoid.x(y.filled(0), x.filled(0), dim=dim)  # reads even a single point
    if all_valid(y, x) or y.shape[dim] < 2:
        return Dense(result)
    heights, width = intervals(y, x, dim)
    return Dense((heights.data * width).sum(dim) / 2, heights.any_valid(dim))


@masked_rule(aten.trapezoid.dx, aten.trapz.dx, category=REDUCTION, dims=Along("reduced", size=2))
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


# --------------------------------------------------------------------------------- decompositions that read the batch


def numbers_positions(x: Tensor, dims: Sequence[int]) -> bool:
    """Whether a tensor knows along one of these dimensions which of its samples' positions are there."""
    extent = getattr(x, "_extent", None)
    return extent is not None and any(extent.numbers(d % x.ndim) for d in dims)


@masked_rule(aten.diff.default, category=COMPOSITE)
def diff(self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Any:
    """torch's decomposition takes a number of positions, which counts in the batch; bounds from the end, which it
    takes where a batch is padded, are each sample's own.
    """
    if not numbers_positions(self, [dim]):
        return aten.diff.default.decompose(self, n, dim, prepend, append)
    joined = [t for t in (prepend, self, append) if t is not None]
    x = torch.cat(joined, dim) if len(joined) > 1 else self
    for _ in range(n):
        after, before = aten.slice(x, dim, 1), aten.slice(x, dim, 0, -1)
        x = after ^ before if x.dtype is torch.bool else after - before
    return x.clone() if x is self else x


@masked_rule(
    *(getattr(aten.gradient, name) for name in aten.gradient.overloads()),
    aten.fft_fftshift.default,
    aten.fft_ifftshift.default,
    aten.linalg_vander.default,
    category=COMPOSITE,
    takes_op=True,
)
def of_the_batch(op: OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch's decomposition, which reads the ends of the batch or counts its size: not each sample's own."""
    given, instead = _ALONG[packet_name(op)]
    dims = given(x, {**kwargs, **dict(zip((a.name for a in op._schema.arguments[1:]), args, strict=False))})
    if numbers_positions(x, dims):
        raise MaskedSemanticsError(
            f"{packet_name(op)}: along dimensions {sorted(d % x.ndim for d in dims)} of a tensor of shape "
            f"{tuple(x.shape)}, which number positions of padded samples, it {instead} Or apply it to each sample "
            "before they are padded to a batch."
        )
    return op.decompose(x, *args, **kwargs)


def _given(x: Tensor, named: Mapping[str, Any]) -> Sequence[int]:
    dim = named.get("dim")
    return range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim


# The dimensions along which a decomposition reads what is the batch's, and what to do instead.
_ALONG: Mapping[str, tuple[Callable[[Tensor, Mapping[str, Any]], Sequence[int]], str]] = {
    "gradient": (_given, "reads the ends of the batch. Inside a sample it is (x[:, 2:] - x[:, :-2]) / 2."),
    "fft_fftshift": (_given, "rolls by half the size of the batch, not of each sample."),
    "fft_ifftshift": (_given, "rolls by half the size of the batch, not of each sample."),
    "linalg_vander": (
        lambda x, named: [-1] if named.get("N") is None else [],
        "takes as many powers as the batch has positions: state their number, N=.",
    ),
}


# --------------------------------------------------------- on sparse storage, composed of operators that have lowerings


@trace.lowering(Sparse)
@on_call
def trace_sparse(c: Bound) -> Any:
    aten.trace(torch.empty((1,) * c.self.ndim, dtype=c.self.dtype))  # raises torch's errors
    return call(aten.sum.default, call(aten.diagonal.default, c.self))


@linalg_cross.lowering(Sparse)
def linalg_cross_sparse(op: OpOverload, x: Dense | Sparse, y: Dense | Sparse, *, dim: int = -1) -> Any:
    shape = op(*(shape_alone(r.shape) for r in (x, y)), dim=dim).shape
    x, y = (broadcast_to(r, shape) if isinstance(r, Sparse) else r.map(lambda t: t.expand(shape)) for r in (x, y))

    def shifted(record: Dense | Sparse, shift: int) -> Any:
        return call(aten.roll.default, record, [-shift], [dim])

    minuend = call(aten.mul.Tensor, shifted(x, 1), shifted(y, 2))
    return call(aten.sub.Tensor, minuend, call(aten.mul.Tensor, shifted(x, 2), shifted(y, 1)))


@trapezoid_dx.lowering(Sparse)
@on_call(floats="y", elements=True)
def trapezoid_dx_sparse(c: Bound) -> Dense:
    total = to_dense(call(aten.sum.dim_IntList, _heights(c), [c.dim]))
    return Dense(total.data * (c.dx / 2), total.validity)


@trapezoid_x.lowering(Sparse)
@on_call(sparse="y", floats="y", elements=True)
def trapezoid_x_sparse(c: Bound) -> Dense:
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
def glu_sparse(c: Bound) -> Any:
    self, dim = c.self, c.dim
    aten.glu(shape_alone(one_element_but_along(self.shape, dim)), dim)  # raises torch's errors for the shape
    aten.glu(torch.empty(2, dtype=self.dtype))  # and for the dtype
    half = self.shape[dim] // 2
    gate = call(aten.sigmoid.default, slice_of(self, dim, half, 2 * half))
    return call(aten.mul.Tensor, slice_of(self, dim, 0, half), gate)


# Along dense dimensions first, then along sparse ones.
pointwise.glu.lowering(Sparse)(first_of(ON_STORED_ROWS, glu_sparse))
pointwise.glu.lowering(Permuted)(ON_STORED_ROWS)
