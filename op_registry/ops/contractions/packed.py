"""Products of hybrid storage with a plain weight: the rule runs on the stored rows as they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from op_registry.authoring import Dense, NotLowered, Number, align_to, rows_of
from op_registry.ops.contractions import matmul


def linear(op: OpOverload, input: Any, weight: Any, bias: Any = None) -> Any:
    x = rows_of(input, weight, bias)
    return x.like(matmul.linear.run(x.values, weight, bias))


def matmul_with_plain(op: OpOverload, self: Any, other: Any) -> Any:
    """A product with a vector, or with one matrix for all rows."""
    x = rows_of(self, other)
    if other.ndim not in (1, 2):
        raise NotLowered("each element of a sparse dimension has a matrix of its own")
    return x.like(matmul.matmul.run(op, x.values, other))


def mm(op: OpOverload, self: Any, mat2: Any, *out_dtype: torch.dtype) -> Any:
    x = rows_of(self, mat2)
    if x.ndim != 2 or mat2.ndim != 2:
        raise NotLowered("each element of a sparse dimension has a matrix of its own")
    return x.like(matmul.mm.run(op, x.values, mat2, *out_dtype))


def addmm(
    op: OpOverload,
    self: Any,
    mat1: Any,
    mat2: Any,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    x = rows_of(mat1, self, mat2)
    if x.ndim != 2 or mat2.ndim != 2:
        raise NotLowered("each element of a sparse dimension has a matrix of its own")
    result = x.like(Dense(x.values.data.new_empty(()).expand(x.values.shape[0], mat2.shape[1])))
    return x.like(matmul.addmm.run(op, align_to(self, result), x.values, mat2, *out_dtype, beta=beta, alpha=alpha))
