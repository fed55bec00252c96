"""The other products with sparse operands, and their sums: bmm, addmm, addmv, addbmm, baddbmm, addr, linear, dot.

Law: that of matmul.py. A product and an added operand are summed elementwise: valid, and stored, where both are. With
``beta=0`` the added operand takes no part. These run calls that sparse.py and packed.py do not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    COO,
    Dense,
    NotLowered,
    Number,
    Sparse,
    call,
    call_broadcast,
    from_coordinates,
    refuse_permuted,
    require_float,
    valid_elements,
)
from op_registry.ops.contractions import matmul
from op_registry.ops.contractions.sparse import matrix_dims, product

aten = torch.ops.aten


def batched(a: Dense | Sparse, b: Dense | Sparse) -> Any:
    """A product of matrices, or of equally many batches of them, with a sparse factor."""
    refuse_permuted(a, b)
    require_float(a, b)
    if a.ndim != b.ndim or a.ndim not in (2, 3) or a.dtype is not b.dtype or 0 in (*a.shape, *b.shape):
        raise NotLowered("its operands are broadcast over batches, or empty")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise NotLowered("torch refuses it")
    a, b = (without_dense_dims(x) if isinstance(x, Sparse) else x for x in (a, b))
    if isinstance(a, Dense) and isinstance(b, Dense):
        return call(aten.bmm.default if a.ndim == 3 else aten.mm.default, a, b)
    if isinstance(a, Dense) and a.ndim == 3:
        transposed = product(call(aten.transpose.int, b, 1, 2), a.map(lambda t: t.mT))
        assert isinstance(transposed, Dense)
        return transposed.map(lambda t: t.mT)
    return product(a, b)


def without_dense_dims(x: Sparse) -> Sparse:
    """The same matrix without dense dimensions: their valid elements are stored one by one."""
    if not x.dense_sizes:
        return x
    flat, coordinates = valid_elements(x)
    return from_coordinates(COO, coordinates, flat, tuple(x.shape))


def scaled(x: Dense | Sparse, factor: Number) -> Dense | Sparse:
    """A record times a number."""
    if factor == 1:
        return x
    if isinstance(x, Dense):
        return x.like(x.filled(0) * factor)
    return x.like(x.values.like(x.values.filled(0) * factor))


def summed(self: Dense | Sparse, result: Dense | Sparse, beta: Number, alpha: Number) -> Any:
    """``beta * self + alpha * result``, elementwise."""
    if self.dtype is not result.dtype or torch.broadcast_shapes(self.shape, result.shape) != result.shape:
        raise NotLowered("the added operand has another dtype, or does not broadcast to the product")
    result = scaled(result, alpha)
    return result if beta == 0 else call_broadcast(aten.add.Tensor, scaled(self, beta), result)


# ------------------------------------------------------------------------------------------------------------ operators
# Tried last (__init__.py): packed.py and sparse.py need not list the elements of dense dimensions.


def mm(op: OpOverload, self: Dense | Sparse, mat2: Dense | Sparse, *out_dtype: torch.dtype) -> Any:
    if out_dtype or op not in (aten.mm.default, aten.bmm.default) or self.ndim != matrix_dims(op):
        raise NotLowered("its result has another dtype")
    return batched(self, mat2)


def addmm(
    op: OpOverload,
    self: Dense | Sparse,
    mat1: Dense | Sparse,
    mat2: Dense | Sparse,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    if out_dtype or mat1.ndim != matrix_dims(op):
        raise NotLowered("its result has another dtype, or torch refuses its factors")
    return summed(self, batched(mat1, mat2), beta, alpha)


def matmul_of_vectors(op: OpOverload, self: Dense | Sparse, other: Dense | Sparse) -> Any:
    require_float(self, other)
    if self.ndim == 1 and other.ndim == 1:
        if self.shape != other.shape or self.shape[0] == 0:
            raise NotLowered("torch refuses it, or it is empty")
        return call(aten.sum.default, call(aten.mul.Tensor, self, other))
    if other.ndim == 1:
        return call(aten.squeeze.dim, batched(self, call(aten.unsqueeze.default, other, 1)), -1)
    if self.ndim == 1:
        return call(aten.squeeze.dim, batched(call(aten.unsqueeze.default, self, 0), other), 0)
    return batched(self, other)


def linear(op: OpOverload, input: Dense | Sparse, weight: Dense | Sparse, bias: Dense | Sparse | None = None) -> Any:
    refuse_permuted(input, weight, bias)
    if weight.ndim != 2 or input.ndim < 1 or 0 in input.shape:
        raise NotLowered("its weight is not a matrix, or its input is empty")
    rows = call(aten.view.default, input, [-1, input.shape[-1]]) if input.ndim != 2 else input
    result = batched(rows, call(aten.t.default, weight))
    if input.ndim != 2:
        result = call(aten.view.default, result, [*input.shape[:-1], weight.shape[0]])
    return result if bias is None else summed(bias, result, 1, 1)


@matmul.addmv.lowering(Sparse)
def addmv(
    op: OpOverload,
    self: Dense | Sparse,
    mat: Dense | Sparse,
    vec: Dense | Sparse,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    if mat.ndim != 2 or vec.ndim != 1:
        raise NotLowered("torch refuses it")
    return summed(self, matmul_of_vectors(aten.mv.default, mat, vec), beta, alpha)


@matmul.addbmm.lowering(Sparse)
def addbmm(
    op: OpOverload,
    self: Dense | Sparse,
    batch1: Dense | Sparse,
    batch2: Dense | Sparse,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    if batch1.ndim != 3:
        raise NotLowered("torch refuses it")
    return summed(self, call(aten.sum.dim_IntList, batched(batch1, batch2), [0]), beta, alpha)


@matmul.addr.lowering(Sparse)
def addr(
    op: OpOverload,
    self: Dense | Sparse,
    vec1: Dense | Sparse,
    vec2: Dense | Sparse,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    require_float(self, vec1, vec2)
    if vec1.ndim != 1 or vec2.ndim != 1:
        raise NotLowered("torch refuses it")
    column, row = call(aten.unsqueeze.default, vec1, 1), call(aten.unsqueeze.default, vec2, 0)
    return summed(self, call_broadcast(aten.mul.Tensor, column, row), beta, alpha)
