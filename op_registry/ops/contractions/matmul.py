"""Matrix products, alone and with an added operand; bilinear forms; affine grids.

Law: a contraction is the sum of products over the index tuples whose factors are all valid. It is valid where there is
at least one such tuple, or no tuple at all (a contracted dimension of size 0). An added `self` or bias is elementwise:
it never makes an invalid element valid, and with ``beta=0`` neither its values nor its mask take part.

Every factor is filled with 0, and the operator itself runs once. The result's mask costs far less: with one masked
factor, "some element of the row is valid" decides, and broadcasts over the other factor; only two masked factors need
a product of validities. As in every padded batch, 0 · inf is NaN: a valid infinity times an invalid factor spoils the
sum.

einsum, tensordot, inner, outer, kron, bilinear and chains of products are left to torch's decompositions: contracting
in steps sums over the same tuples as contracting at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    CONTRACTION,
    Dense,
    Equation,
    Number,
    aligned_validity,
    all_valid,
    as_bool,
    intersect,
    masked_rule,
    product_validity,
    refused,
    transposed,
    zeroed,
)

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------- validity of products


def matmul_validity(a: Dense, b: Dense) -> Tensor | None:
    """Validity of torch.matmul(a, b), vectors included."""
    if all_valid(a, b):
        return None
    if a.ndim == 1 or b.ndim == 1:
        return vector_validity(a, b)
    return product_validity(a, b)


def vector_validity(a: Dense, b: Dense) -> Tensor | None:
    """Validity of torch.matmul(a, b) where one of the two is a vector."""
    if a.shape[-1] == 0:
        return None
    if b.validity is None:
        return a.any_valid(-1)
    if a.validity is None:
        return b.any_valid(-1 if b.ndim == 1 else -2)
    left, right = aligned_validity(a), aligned_validity(b)
    assert left is not None
    assert right is not None
    if b.ndim == 1:
        return Dense(a.data, intersect(left, right)).any_valid(-1)
    return Dense(b.data, intersect(left.unsqueeze(-1), right)).any_valid(-2)


def with_bias(data: Tensor, validity: Tensor | None, bias: Dense | None, beta: Number = 1) -> Dense:
    """The record of a product to which `beta` times `bias` was added."""
    return Dense(data, validity if bias is None or beta == 0 else intersect(validity, bias.validity))


# ------------------------------------------------------------------------------------------------------------- products


@masked_rule(
    aten.mm.default,
    aten.mm.dtype,
    aten.bmm.default,
    aten.bmm.dtype,
    aten._int_mm.default,
    category=CONTRACTION,
    takes_op=True,
    sparse_factors=True,
)
def mm(op: OpOverload, self: Dense, mat2: Dense, *out_dtype: torch.dtype) -> Dense:
    return Dense(op(self.filled(0), mat2.filled(0), *out_dtype), product_validity(self, mat2))


@masked_rule(
    aten.matmul.default,
    aten.linalg_matmul.default,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,
    category=CONTRACTION,
    takes_op=True,
    dims=Equation("*mk,*kn->*mn", "*mk,k->*m", "k,*kn->*n", "k,k->"),
    sparse_factors=True,
)
def matmul(op: OpOverload, self: Dense, other: Dense) -> Dense:
    return Dense(op(self.filled(0), other.filled(0)), matmul_validity(self, other))


@masked_rule(aten.linear.default, category=CONTRACTION, dims=Equation("*k,nk,+->*n", "*k,k,+->*"), sparse_factors=True)
def linear(input: Dense, weight: Dense, bias: Dense | None = None) -> Dense:
    data = aten.linear(input.filled(0), weight.filled(0), None if bias is None else bias.filled(0))
    if weight.ndim == 1:
        validity = matmul_validity(input, weight)
    elif weight.validity is None:
        # One validity per token stays one validity per token.
        validity = None if input.shape[-1] == 0 else input.any_valid(-1, keepdim=True)
    else:
        validity = matmul_validity(input, transposed(weight))
    result = with_bias(data, validity, bias)
    return result.like(zeroed(result.data, result.validity))


# --------------------------------------------------------------------------------------------- products plus an operand


@masked_rule(
    aten.addmm.default,
    aten.addmm.dtype,
    aten.baddbmm.default,
    aten.baddbmm.dtype,
    category=CONTRACTION,
    takes_op=True,
    sparse_factors=True,
)
def addmm(
    op: OpOverload,
    self: Dense,
    mat1: Dense,
    mat2: Dense,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Dense:
    data = op(self.filled(0), mat1.filled(0), mat2.filled(0), *out_dtype, beta=beta, alpha=alpha)
    return with_bias(data, product_validity(mat1, mat2), self, beta)


@masked_rule(aten._addmm_activation.default, category=CONTRACTION)
def _addmm_activation(
    self: Dense, mat1: Dense, mat2: Dense, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> Dense:
    data = aten._addmm_activation(
        self.filled(0), mat1.filled(0), mat2.filled(0), beta=beta, alpha=alpha, use_gelu=use_gelu
    )
    return with_bias(data, product_validity(mat1, mat2), self, beta)


@masked_rule(aten.addmv.default, category=CONTRACTION, sparse_factors=True)
def addmv(self: Dense, mat: Dense, vec: Dense, *, beta: Number = 1, alpha: Number = 1) -> Dense:
    data = aten.addmv(self.filled(0), mat.filled(0), vec.filled(0), beta=beta, alpha=alpha)
    return with_bias(data, matmul_validity(mat, vec), self, beta)


@masked_rule(aten.addbmm.default, category=CONTRACTION)
def addbmm(self: Dense, batch1: Dense, batch2: Dense, *, beta: Number = 1, alpha: Number = 1) -> Dense:
    data = aten.addbmm(self.filled(0), batch1.filled(0), batch2.filled(0), beta=beta, alpha=alpha)
    validity = product_validity(batch1, batch2)
    if validity is not None:
        validity = as_bool(validity).any(0) if batch1.shape[0] != 0 else None
    return with_bias(data, validity, self, beta)


@masked_rule(aten.addr.default, category=CONTRACTION)
def addr(self: Dense, vec1: Dense, vec2: Dense, *, beta: Number = 1, alpha: Number = 1) -> Dense:
    data = aten.addr(self.filled(0), vec1.filled(0), vec2.filled(0), beta=beta, alpha=alpha)
    rows = None if vec1.validity is None else vec1.validity.unsqueeze(-1)
    return with_bias(data, intersect(rows, vec2.validity), self, beta)


# -------------------------------------------------------------------------------------------------------- three factors


@masked_rule(aten._trilinear.default, category=CONTRACTION)
def _trilinear(
    i1: Dense,
    i2: Dense,
    i3: Dense,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Dense:
    """The core of bilinear: the sum over `sumdim` of i1 · i2 · i3, each with dimensions of size 1 inserted."""

    def contract(factors: Sequence[Tensor]) -> Any:
        return aten._trilinear(*factors, expand1, expand2, expand3, sumdim, unroll_dim)

    factors = (i1, i2, i3)
    data = contract([x.filled(0) for x in factors])
    shapes = [_unsqueezed(x.shape, dims) for x, dims in zip(factors, (expand1, expand2, expand3), strict=True)]
    if all_valid(*factors) or any(shape[d] == 0 for shape in shapes for d in sumdim):
        return Dense(data)
    return Dense(data, contract([_numeric_validity(x) for x in factors]) > 0.5)


def _unsqueezed(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    sizes = list(shape)
    for d in sorted(dims):
        sizes.insert(d, 1)
    return sizes


def _numeric_validity(x: Dense) -> Tensor:
    """1 for a valid element and 0 for an invalid one, to be multiplied and summed."""
    v = x.full_validity
    return torch.ones_like(x.data, dtype=torch.float32) if v is None else v.to(torch.float32)


@masked_rule(aten.affine_grid_generator.default, category=CONTRACTION)
def affine_grid_generator(theta: Dense, size: Sequence[int], align_corners: bool) -> Dense:
    """Each coordinate of the grid is a row of theta times a base point whose coordinates are all valid."""
    grid = aten.affine_grid_generator(theta.filled(0), size, align_corners)
    rows = theta.any_valid(-1)
    return Dense(grid, None if rows is None else rows[(slice(None), *[None] * (grid.ndim - 2))])


@affine_grid_generator.samples
def _affine_grids(make: Callable[[tuple[int, ...]], Tensor]) -> Iterator[tuple[Any, ...]]:
    """In two and in three dimensions."""
    for corners in (False, True):
        yield (make((2, 2, 3)), [2, 1, 3, 4], corners)
        yield (make((2, 3, 4)), [2, 1, 3, 2, 4], corners)


sampled_addmm = refused(
    aten.sparse_sampled_addmm.default,
    reason="it works on a torch.sparse tensor, in which unspecified elements are zero",
    instead="Make the first operand a masked tensor in sparse storage, as_masked_tensor(x) of a torch.sparse tensor or "
    "x.to_sparse_csr() of a masked one, in which they are invalid",
)
