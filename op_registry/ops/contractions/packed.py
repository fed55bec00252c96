"""Products of hybrid storage with a plain matrix: the rule itself runs on the stored rows."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import (
    AnyRecord,
    Dense,
    NotLowered,
    Number,
    Permuted,
    Sparse,
    align_to,
    on_last_dims,
    rows_of,
)
from op_registry.ops.contractions import matmul


def linear(op: OpOverload, input: Dense | Sparse, weight: Dense | Sparse, bias: Dense | Sparse | None = None) -> Sparse:
    x = rows_of(input, weight, bias)
    return x.like(matmul.linear.run(x.values, weight, bias))


def matmul_with_plain(op: OpOverload, self: Dense | Sparse, other: Dense | Sparse) -> Sparse:
    """A product with a vector, or with one matrix for all rows."""
    x = rows_of(self, other)
    if other.ndim not in (1, 2):
        raise NotLowered("each index of a sparse dimension has its own matrix")
    return x.like(matmul.matmul.run(op, x.values, other))


def mm(op: OpOverload, self: Dense | Sparse, mat2: Dense | Sparse, *out_dtype: torch.dtype) -> Sparse:
    x = rows_of(self, mat2)
    if len(x.dense_sizes) != 1 or mat2.ndim != 2:
        raise NotLowered("each index of a sparse dimension has its own matrix")
    return x.like(matmul.mm.run(op, x.values, mat2, *out_dtype))


def addmm(
    op: OpOverload,
    self: Dense | Sparse,
    mat1: Dense | Sparse,
    mat2: Dense | Sparse,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Sparse:
    x = rows_of(mat1, self, mat2)
    if len(x.dense_sizes) != 1 or mat2.ndim != 2:
        raise NotLowered("each index of a sparse dimension has its own matrix")
    product = x.like(Dense(x.values.data.new_empty(()).expand(x.values.shape[0], mat2.shape[1])))  # for its shape
    return x.like(matmul.addmm.run(op, align_to(self, product), x.values, mat2, *out_dtype, beta=beta, alpha=alpha))


def addmm_of_permuted(op: OpOverload, self: AnyRecord, mat1: AnyRecord, mat2: AnyRecord, *args: Any, **kw: Any) -> Any:
    """The same for rows of which several dimensions are merged, (B · T, features)."""
    if not isinstance(mat1, Permuted) or not isinstance(self, Dense):
        raise NotLowered("an operand other than the second is sparse")
    if self.ndim == 2 and self.shape[0] != 1:
        raise NotLowered("each row has a number of its own added")

    def product(op: OpOverload, mat1: Sparse, mat2: Dense, *args: Any, **kw: Any) -> Sparse:
        return addmm(op, self.map(lambda t: t.reshape(-1)), mat1, mat2, *args, **kw)

    return on_last_dims(product, lambda *args, **kw: 1)(op, mat1, mat2, *args, **kw)
