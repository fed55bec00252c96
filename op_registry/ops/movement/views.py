"""Views, and their copying variants (`*_copy`).

Law: an element moves with its validity. The operator is applied to data and validity alike; broadcast dimensions of the
validity stay broadcast (see op_registry/records/layout.py). Where an element is split into parts (`view_as_real`,
`view(dtype)`), a part is valid iff the element was; where parts are merged into an element, it is valid iff all of them
are, and its mask is a copy.

Rules do not deal with aliasing: the tensor subclass tracks which memory a view shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    COMPOSITE,
    MOVEMENT,
    PLUMBING,
    Along,
    Dense,
    Elementwise,
    Equation,
    Permuted,
    Sparse,
    Unknown,
    aligned_validity,
    broadcast_along,
    masked_rule,
)
from op_registry.dimensions.sizes import known_to_hold
from op_registry.dimensions.views import Cut, Reshaped, View
from op_registry.records.arguments import with_leading_dims
from op_registry.records.layout import (
    expand_validity,
    offset_within_data,
    reshape_validity,
    validity_in_strides_of_data,
)
from op_registry.sparse.on_values import ON_PERMUTED_VALUES, ON_VALUES

aten = torch.ops.aten

READS_MEMORY = Unknown("it reads memory, not dimensions")
SLICE = Cut(start="start", stop="end", step="step")


# ------------------------------------------------------------------------------------------ same elements, same shape


@masked_rule(
    aten._conj.default,
    aten._conj_copy.default,
    aten._neg_view.default,
    aten._neg_view_copy.default,
    category=MOVEMENT,
    takes_op=True,
    dims=Elementwise(),
)
def conj(op: OpOverload, x: Dense) -> Dense:
    return x.like(op(x.data))


@masked_rule(
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten._lazy_clone.default,
    category=PLUMBING,
    takes_op=True,
)
def alias(op: OpOverload, x: Dense) -> Dense:
    return x.like(op(x.data))


alias.lowering(Sparse)(ON_VALUES)
alias.lowering(Permuted)(ON_PERMUTED_VALUES)


# ------------------------------------------------------------------------------------------------------- whole shapes


@masked_rule(
    aten.view.default,
    aten.view_copy.default,
    aten._reshape_copy.default,
    category=MOVEMENT,
    takes_op=True,
    dims=Reshaped(),
)
def view(op: OpOverload, x: Dense, size: Sequence[int]) -> Dense:
    return _viewed(op, x, size)


def _viewed(op: OpOverload, x: Dense, size: Sequence[int]) -> Dense:
    data, v = op(x.data, size), aligned_validity(x)
    # A validity with other strides than the data may not be viewable in this shape: reshape then copies it.
    return Dense(data, None if v is None else reshape_validity(v, x.shape, data.shape))


@masked_rule(aten._unsafe_view.default, category=MOVEMENT, dims=Reshaped())
def _unsafe_view(x: Dense, size: Sequence[int]) -> Dense:
    """A copy: torch's result shares memory although it is no view, and would share data without validity."""
    return _viewed(aten.view_copy.default, x, size)


@masked_rule(
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    category=MOVEMENT,
    takes_op=True,
    dims=READS_MEMORY,
)
def _reshape_alias(op: OpOverload, x: Dense, size: Sequence[int], stride: Sequence[int]) -> Dense:
    v = aligned_validity(x)
    return Dense(op(x.data, size, stride), None if v is None else reshape_validity(v, x.shape, size))


@masked_rule(aten.expand.default, aten.expand_copy.default, category=MOVEMENT, takes_op=True, dims=View())
def expand(op: OpOverload, x: Dense, size: Sequence[int], *, implicit: bool = False) -> Dense:
    # The validity broadcasts by itself: only missing dimensions are added.
    data, v = op(x.data, size, implicit=implicit), aligned_validity(x)
    return Dense(data, None if v is None else with_leading_dims(v, data.ndim - v.ndim))


@masked_rule(
    aten.as_strided.default,
    aten.as_strided_copy.default,
    category=MOVEMENT,
    takes_op=True,
    dims=READS_MEMORY,
)
def as_strided(
    op: OpOverload, x: Dense, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Dense:
    data = op(x.data, size, stride, storage_offset)
    if x.validity is None:
        return Dense(data)
    v = validity_in_strides_of_data(x, size, stride, storage_offset)
    return Dense(data, op(v, size, stride, offset_within_data(x, storage_offset)))


# ----------------------------------------------------------------------------------------------- one dimension or two


@masked_rule(aten.permute.default, aten.permute_copy.default, category=MOVEMENT, takes_op=True, dims=View())
def permute(op: OpOverload, x: Dense, dims: Sequence[int]) -> Dense:
    data, v = op(x.data, dims), aligned_validity(x)
    return Dense(data, None if v is None else aten.permute(v, dims))


@masked_rule(aten.transpose.int, aten.transpose_copy.int, category=MOVEMENT, takes_op=True, dims=View())
def transpose(op: OpOverload, x: Dense, dim0: int, dim1: int) -> Dense:
    data, v = op(x.data, dim0, dim1), aligned_validity(x)
    return Dense(data, None if v is None else v.transpose(dim0, dim1))


@masked_rule(aten.t.default, aten.t_copy.default, category=MOVEMENT, takes_op=True, dims=View())
def t(op: OpOverload, x: Dense) -> Dense:
    data, v = op(x.data), aligned_validity(x)
    return Dense(data, None if v is None else v.t())


@masked_rule(aten.unsqueeze.default, aten.unsqueeze_copy.default, category=MOVEMENT, takes_op=True, dims=View())
def unsqueeze(op: OpOverload, x: Dense, dim: int) -> Dense:
    data, v = op(x.data, dim), aligned_validity(x)
    return Dense(data, None if v is None else v.unsqueeze(dim))


@masked_rule(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    category=MOVEMENT,
    takes_op=True,
    dims=View(),
)
def squeeze(op: OpOverload, x: Dense, dim: int | Sequence[int] | None = None) -> Dense:
    data, v = op(x.data) if dim is None else op(x.data, dim), aligned_validity(x)
    if v is None:
        return Dense(data)
    candidates = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    # Only dimensions in which the data has size 1 are removed; a broadcast validity has more of size 1.
    return Dense(data, v.squeeze([d for d in candidates if x.ndim and known_to_hold(x.shape[d] == 1)]))


@masked_rule(aten.select.int, aten.select_copy.int, category=MOVEMENT, takes_op=True, dims=Cut(index="index"))
def select(op: OpOverload, x: Dense, dim: int, index: int) -> Dense:
    data, v = op(x.data, dim, index), aligned_validity(x)
    return Dense(data, None if v is None else v.select(dim, 0 if broadcast_along(v, dim) else index))


@masked_rule(aten.slice.Tensor, aten.slice_copy.Tensor, category=MOVEMENT, takes_op=True, dims=SLICE)
def slice(
    op: OpOverload, x: Dense, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Dense:
    data, v = op(x.data, dim, start, end, step), aligned_validity(x)
    if v is None or broadcast_along(v, dim):
        return Dense(data, v)
    moved = aten.slice.Tensor(v, dim, start, end, step)
    # While tracing with a data-dependent start, the two sizes would be two unrelated symbols.
    torch._check(moved.shape[dim] == data.shape[dim])
    return Dense(data, moved)


@masked_rule(aten.narrow_copy.default, category=MOVEMENT, dims=Cut(start="start", length="length"))
def narrow_copy(x: Dense, dim: int, start: int, length: int) -> Dense:
    data, v = aten.narrow_copy(x.data, dim, start, length), aligned_validity(x)
    if v is None or broadcast_along(v, dim):
        return Dense(data, v)
    return Dense(data, v.narrow(dim, start, length))


@masked_rule(aten.narrow.default, category=COMPOSITE)
def narrow(self: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A negative start counts from the end, as that of the slice ``x[:, -k:]`` does."""
    if self.ndim == 0 or not -self.ndim <= dim < self.ndim or not known_to_hold(start + length <= self.shape[dim]):
        torch.empty(self.shape, device="meta").narrow(dim, start, length)  # torch's error, if it has one
    if known_to_hold(start < 0):
        torch.empty(self.shape, device="meta").narrow(dim, start, length)
        return aten.slice.Tensor(self, dim, start, None if known_to_hold(start + length >= 0) else start + length)
    torch._check(length >= 0, lambda: "narrow(): length must be non-negative.")
    return aten.slice.Tensor(self, dim, start, start + length)


@masked_rule(aten.diagonal.default, aten.diagonal_copy.default, category=MOVEMENT, takes_op=True, dims=View())
def diagonal(op: OpOverload, x: Dense, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Dense:
    data, v = op(x.data, offset, dim1, dim2), aligned_validity(x)
    if v is None:
        return Dense(data)
    if broadcast_along(v, dim1) and broadcast_along(v, dim2):
        return Dense(data, v.diagonal(0, dim1, dim2))
    return Dense(data, expand_validity(v, x.shape, (dim1, dim2)).diagonal(offset, dim1, dim2))


@masked_rule(
    aten.unfold.default,
    aten.unfold_copy.default,
    category=MOVEMENT,
    takes_op=True,
    dims=Along("window", "dimension", more=1, size="size", step="step"),
)
def unfold(op: OpOverload, x: Dense, dimension: int, size: int, step: int) -> Dense:
    data, v = op(x.data, dimension, size, step), aligned_validity(x)
    if v is None:
        return Dense(data)
    if x.ndim and not broadcast_along(v, dimension):
        return Dense(data, v.unfold(dimension, size, step))
    return Dense(data, v.unsqueeze(-1))


# ------------------------------------------------------------------------------------------------------------- pieces

EQUAL_PIECES, PIECES = Cut(sizes="split_size"), Cut(sizes="split_sizes")


@masked_rule(aten.split.Tensor, aten.split_copy.Tensor, category=MOVEMENT, takes_op=True, dims=EQUAL_PIECES)
def split(op: OpOverload, x: Dense, split_size: int, dim: int = 0) -> list[Dense]:
    return _pieces(op(x.data, split_size, dim), x, dim)


@masked_rule(
    aten.split_with_sizes.default, aten.split_with_sizes_copy.default, category=MOVEMENT, takes_op=True, dims=PIECES
)
def split_with_sizes(op: OpOverload, x: Dense, split_sizes: Sequence[int], dim: int = 0) -> list[Dense]:
    return _pieces(op(x.data, split_sizes, dim), x, dim)


@masked_rule(aten.unsafe_split.Tensor, category=MOVEMENT, dims=EQUAL_PIECES)
def unsafe_split(x: Dense, split_size: int, dim: int = 0) -> list[Dense]:
    """Copies: torch's pieces share memory although they are no views, and would share data without validity."""
    return _pieces(aten.split_copy.Tensor(x.data, split_size, dim), x, dim)


@masked_rule(aten.unsafe_split_with_sizes.default, category=MOVEMENT, dims=PIECES)
def unsafe_split_with_sizes(x: Dense, split_sizes: Sequence[int], dim: int = 0) -> list[Dense]:
    """Copies, as for `unsafe_split`."""
    return _pieces(aten.split_with_sizes_copy.default(x.data, split_sizes, dim), x, dim)


def _pieces(pieces: Sequence[Tensor], x: Dense, dim: int) -> list[Dense]:
    v = aligned_validity(x)
    if v is None or broadcast_along(v, dim):
        return [Dense(piece, v) for piece in pieces]
    sizes = [piece.shape[dim] for piece in pieces]
    return [Dense(piece, part) for piece, part in zip(pieces, v.split_with_sizes(sizes, dim), strict=True)]


@masked_rule(aten.unbind.int, aten.unbind_copy.int, category=MOVEMENT, takes_op=True, dims=Cut())
def unbind(op: OpOverload, x: Dense, dim: int = 0) -> list[Dense]:
    pieces, v = op(x.data, dim), aligned_validity(x)
    if v is None:
        return [Dense(piece) for piece in pieces]
    if broadcast_along(v, dim):
        shared = v.select(dim, 0)
        return [Dense(piece, shared) for piece in pieces]
    return [Dense(piece, part) for piece, part in zip(pieces, v.unbind(dim), strict=True)]


# -------------------------------------------------------------------------------------------------- parts of elements


@masked_rule(
    aten.view_as_real.default, aten.view_as_real_copy.default, category=MOVEMENT, takes_op=True, dims=Equation("*->*C")
)
def view_as_real(op: OpOverload, x: Dense) -> Dense:
    """Also for conjugated data, which torch refuses: a masked tensor shows no conjugate bit, so `x.conj().imag` calls
    this.
    """
    data, v = op(x.data.resolve_conj()), aligned_validity(x)
    return Dense(data, None if v is None else v.unsqueeze(-1))


@masked_rule(
    aten.view_as_complex.default,
    aten.view_as_complex_copy.default,
    category=MOVEMENT,
    takes_op=True,
    dims=Equation("*c->*"),
)
def view_as_complex(op: OpOverload, x: Dense) -> Dense:
    data, v = op(x.data), aligned_validity(x)
    return Dense(data, None if v is None else v.amin(-1))


@masked_rule(
    aten.view.dtype,
    aten.view_copy.dtype,
    category=MOVEMENT,
    takes_op=True,
    dims=Unknown("elements of another size take others' places"),
)
def view_dtype(op: OpOverload, x: Dense, dtype: torch.dtype) -> Dense:
    data, v = op(x.data, dtype), aligned_validity(x)
    if v is None or data.shape == x.shape or broadcast_along(v, -1):
        return Dense(data, v)
    if data.shape[-1] > x.shape[-1]:
        return Dense(data, v.repeat_interleave(x.dtype.itemsize // dtype.itemsize, -1))
    return Dense(data, v.unflatten(-1, (data.shape[-1], dtype.itemsize // x.dtype.itemsize)).amin(-1))
