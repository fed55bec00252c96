"""Matrix products with sparse storage.

Law: that of matmul.py. Valid factors are stored, so only pairs of stored factors are visited. Sparse by dense and dense
by sparse give a dense result, sparse by sparse a sparse one. A product of dense factors that is added to a sparse
tensor is computed only where that tensor stores elements (torch's `sampled_addmm`).

Sparse operands with dense dimensions are left to packed.py and sparse_sums.py; __init__.py has the order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    Dense,
    NotLowered,
    Number,
    RowColumn,
    Segments,
    Sparse,
    accumulation_dtype,
    as_int8,
    autocast_on,
    being_traced,
    coalesce,
    full_mask,
    intersect,
    known_to_hold,
    map_tensors,
    ravel,
    sddmm,
    shape_alone,
    spmm,
    transposed,
    unravel,
)
from op_registry.ops.contractions import matmul
from op_registry.ops.contractions.matmul import with_bias

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------------- products of two factors


def row_column(x: Sparse, batched: bool) -> RowColumn:
    """The coordinates of the elements of `x` (*batch, rows, columns) in one matrix of all batches' rows.

    `batched`: the columns of all batches lie side by side as well, so that the matrix is block-diagonal.
    """
    return x.pattern.cached(("row_column", batched), lambda: _row_column(x, batched))


def _row_column(x: Sparse, batched: bool) -> RowColumn:
    pattern, coordinates = x.pattern, x.pattern.coordinates()
    *batch, rows, columns = pattern.sizes
    number = math.prod(batch)
    row = ravel(coordinates[:-1], pattern.sizes[:-1])
    column = ravel((*coordinates[:-2], coordinates[-1]), (*batch, columns)) if batched else coordinates[-1]
    in_order = pattern.layout.row_major
    ends = pattern.ends() if in_order else None
    ends = ends if ends is None or ends.dtype is torch.int64 else ends.to(torch.int64)
    return RowColumn(row, column, number * rows, columns * (number if batched else 1), in_order=in_order, ends=ends)


def matrix(x: Dense | Sparse) -> Sparse:
    """A sparse operand that is a matrix, or a batch of them, without dense dimensions; NotLowered otherwise."""
    if not isinstance(x, Sparse) or x.dense_sizes or x.ndim < 2 or 0 in x.shape:
        raise NotLowered("its sparse operand is not a matrix, has dense dimensions or is empty")
    return x


def check_factors(a: Dense | Sparse, b: Dense | Sparse) -> None:
    """NotLowered unless torch would multiply these operands, without converting them first."""
    if (
        a.dtype is not b.dtype
        or a.shape[-1] != b.shape[-2]
        or (a.ndim == 3 and b.ndim == 3 and a.shape[0] != b.shape[0])
    ):
        raise NotLowered(f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype} cannot be multiplied")
    if autocast_on(a.device):
        raise NotLowered("autocast chooses another dtype")
    if a.dtype is torch.bool:
        raise NotLowered("torch refuses it")


def sparse_by_dense(a: Sparse, b: Dense) -> Dense:
    """(*batch, m, k) by (k, n), or (batch, m, k) by (batch, k, n)."""
    if b.ndim not in (2, a.ndim) or a.ndim > 3:
        raise NotLowered("its operands are broadcast over batches")
    check_factors(a, b)
    b_valid = None if b.full_validity is None else b.full_validity.flatten(0, -2)
    coordinates = row_column(a, batched=b.ndim == 3)
    data, validity = stored_by_rows(a, b.filled(0).flatten(0, -2), b_valid, coordinates, along=a.pattern.ndim - 1)
    return Dense(*(t.reshape(*a.shape[:-1], t.shape[-1]) for t in (data, validity)))


def dense_by_sparse(a: Dense, b: Sparse) -> Dense:
    """(m, k) by (k, n), as the transpose of sparse by dense."""
    if a.ndim != 2 or b.ndim != 2:
        raise NotLowered("its operands are broadcast over batches")
    check_factors(a, b)
    a_valid = None if a.full_validity is None else a.full_validity.t()
    data, validity = stored_by_rows(b, a.filled(0).t(), a_valid, row_column(b, batched=False).transposed, along=0)
    return Dense(data.t().contiguous(), validity.t())


def stored_by_rows(
    x: Sparse, rows: Tensor, rows_valid: Tensor | None, coordinates: RowColumn, along: int
) -> tuple[Tensor, Tensor]:
    """Data and validity of the products of stored elements with rows of a dense matrix, summed along one dimension.

    `rows` holds 0 where invalid. If all of it is valid (None), a row of the result is valid where `x` stores a valid
    element: validity (rows, 1).
    """
    flat = x.flat
    data = spmm(flat.filled(0), rows, coordinates)
    if rows_valid is None or known_to_hold(rows.shape[-1] == 0):
        return data, as_int8(Segments(x, (along,)).count(flat) > 0).unsqueeze(1)
    valid_rows = as_int8(rows_valid).to(torch.float32)
    valid_products = spmm(as_int8(full_mask(flat)).to(torch.float32), valid_rows, coordinates)
    return data, as_int8(valid_products > 0.5)


def sparse_by_sparse(a: Sparse, b: Sparse) -> Sparse:
    """Each element of `a` times the row of `b` that its column selects; products with equal coordinates are summed.

    Batches are one product of block-diagonal matrices, so that each element selects a row of its own batch.
    """
    if a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2]:
        raise NotLowered("its operands are broadcast over batches")
    if being_traced(a.values.data):
        raise NotLowered("the number of products is not known while tracing")
    check_factors(a, b)
    left, right, batched = a.flat, b.flat, a.ndim > 2
    coordinates = row_column(a, batched)
    order, columns, ends = row_column(b, batched).by_row()
    partner_counts = ends.diff()[coordinates.column]  # for every element of `a`
    source = torch.repeat_interleave(partner_counts)
    offset = ends[coordinates.column] - (partner_counts.cumsum(0) - partner_counts)
    partner = offset[source] + torch.arange(source.shape[0], device=a.device)
    row, column = coordinates.row[source], columns[partner]
    partner = partner if order is None else order[partner]
    validity = None
    if left.validity is not None or right.validity is not None:
        validity = intersect(as_int8(full_mask(left))[source], as_int8(full_mask(right))[partner])
    products = Dense(left.filled(0)[source] * right.filled(0)[partner], validity)
    unraveled = (*unravel(row, a.shape[:-1]), column % b.shape[-1]) if batched else (row, column)
    return coalesce(a.pattern.layout.exact_sibling, unraveled, products, (*a.shape[:-1], b.shape[-1]))


def product(a: Dense | Sparse, b: Dense | Sparse) -> Dense | Sparse:
    """A product with one or two sparse factors."""
    if isinstance(a, Sparse):
        return sparse_by_sparse(matrix(a), matrix(b)) if isinstance(b, Sparse) else sparse_by_dense(matrix(a), b)
    return dense_by_sparse(a, matrix(b))


def sampled(self: Sparse, a: Dense, b: Dense, beta: Number, alpha: Number) -> Sparse:
    """``beta * self + alpha * a @ b`` where `self` is stored; elsewhere the sum is invalid."""
    check_factors(a, b)
    if self.shape != (a.shape[0], b.shape[1]) or a.shape[1] == 0 or self.dtype is not a.dtype:
        raise NotLowered("its operands are broadcast or differ in dtype, or nothing is contracted")
    coordinates, flat = row_column(self, batched=False), self.flat
    products = sddmm(a.filled(0), b.filled(0).t(), coordinates)
    data = alpha * products + (beta * flat.data if beta != 0 else 0)
    validity = None
    if a.validity is not None or b.validity is not None:
        a_valid, b_valid = (as_int8(full_mask(x)).expand(x.shape).to(torch.float32) for x in (a, b))
        validity = as_int8(sddmm(a_valid, b_valid.t(), coordinates) > 0.5)
    return self.folded(Dense(data, validity).masked_by(flat.full_validity))


# ------------------------------------------------------------------------------------------------------------ operators


def rounded_once(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: products of half-precision operands in torch's accumulation dtype, rounded once at the end."""

    @functools.wraps(lowering)
    def in_accumulation_dtype(*args: Any, **kwargs: Any) -> Any:
        dtypes: set[torch.dtype] = set()
        map_tensors(lambda r: dtypes.add(r.dtype), [*args, *kwargs.values()], (Dense, Sparse))
        (dtype,) = dtypes if len(dtypes) == 1 else (None,)
        if dtype is None or accumulation_dtype(dtype) is dtype or autocast_on(_device_of(args)):
            return lowering(*args, **kwargs)
        wide = accumulation_dtype(dtype)
        positional, named = map_tensors(lambda r: cast(r, wide), (list(args), list(kwargs.items())), (Dense, Sparse))
        return map_tensors(lambda r: cast(r, dtype), lowering(*positional, **dict(named)), (Dense, Sparse))

    return in_accumulation_dtype


def _device_of(args: Sequence[Any]) -> torch.device:
    devices: list[torch.device] = []
    map_tensors(lambda r: devices.append(r.device), list(args), (Dense, Sparse))
    return devices[0]


def cast(record: Dense | Sparse, dtype: torch.dtype) -> Dense | Sparse:
    """A record in another dtype."""
    if isinstance(record, Sparse):
        return record.like(record.values.like(record.values.data.to(dtype)))
    return record.like(record.data.to(dtype))


def matrix_dims(op: OpOverload) -> int:
    """The number of dimensions of the factors of mm, addmm, bmm and baddbmm."""
    return 3 if "bmm" in op._schema.name else 2


@rounded_once
def mm(op: OpOverload, self: Dense | Sparse, mat2: Dense | Sparse, *out_dtype: torch.dtype) -> Any:
    if out_dtype or op._schema.name == "aten::_int_mm" or {self.ndim, mat2.ndim} != {matrix_dims(op)}:
        raise NotLowered("its result has another dtype, or torch refuses it")
    return product(self, mat2)


@rounded_once
def matmul_with_sparse(op: OpOverload, self: Dense | Sparse, other: Dense | Sparse) -> Any:
    if op not in (aten.matmul.default, aten.mv.default, aten.linalg_matmul.default):
        raise NotLowered("it is a product of vectors")
    if other.ndim == 1:
        if not isinstance(other, Dense):
            raise NotLowered("its vector is sparse")
        column = product(self, other.map(lambda t: t.unsqueeze(1)))
        return column.map(lambda t: t.squeeze(-1)) if isinstance(column, Dense) else column
    if self.ndim == 1:
        if not isinstance(self, Dense):
            raise NotLowered("its vector is sparse")
        row = product(self.map(lambda t: t.unsqueeze(0)), other)
        return row.map(lambda t: t.squeeze(0)) if isinstance(row, Dense) else row
    return product(self, other)


@rounded_once
def linear_with_sparse(
    op: OpOverload, input: Dense | Sparse, weight: Dense | Sparse, bias: Dense | Sparse | None = None
) -> Any:
    if weight.ndim != 2 or not isinstance(input, Sparse) or not isinstance(weight, Dense) or isinstance(bias, Sparse):
        raise NotLowered("its weight is not a matrix, or its weight or bias is sparse")
    result = sparse_by_dense(matrix(input), transposed(weight))
    return _summed(result.data, result, bias)


@rounded_once
def addmm_with_sparse(
    op: OpOverload,
    self: Dense | Sparse,
    mat1: Dense | Sparse,
    mat2: Dense | Sparse,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    if out_dtype:
        raise NotLowered("its result has another dtype")
    if not (self.dtype.is_floating_point or self.dtype.is_complex) and any(type(s) is float for s in (beta, alpha)):
        raise NotLowered("torch rounds fractional factors of integers")
    if {mat1.ndim, mat2.ndim} != {matrix_dims(op)}:
        raise NotLowered("torch refuses it")
    if isinstance(self, Sparse):
        if not isinstance(mat1, Dense) or not isinstance(mat2, Dense) or beta == 0 or mat1.ndim != 2 or mat2.ndim != 2:
            raise NotLowered("it is added to a sparse operand, with beta=0 or factors that are not dense matrices")
        return sampled(matrix(self), mat1, mat2, beta, alpha)
    result = product(mat1, mat2)
    if not isinstance(result, Dense) or self.dtype is not result.dtype:
        raise NotLowered("a sparse product is added to a dense operand, or to one of another dtype")
    return _summed(alpha * result.data, result, self, beta)


def _summed(data: Tensor, result: Dense, bias: Dense | None, beta: Number = 1) -> Dense:
    if bias is not None and beta != 0:
        torch.broadcast_to(shape_alone(bias.shape), data.shape)  # raises torch's own error
        data = data + (bias.filled(0) if beta == 1 else beta * bias.filled(0))
    return with_bias(data, result.full_validity, bias, beta)


# Refused on torch.sparse tensors, whose unspecified elements are zero. Here they are invalid, so it is well defined.
@matmul.sampled_addmm.lowering(Sparse)
@rounded_once
def sampled_by_sparse(
    op: OpOverload,
    self: Dense | Sparse,
    mat1: Dense | Sparse,
    mat2: Dense | Sparse,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    if not isinstance(mat1, Dense) or not isinstance(mat2, Dense) or mat1.ndim != 2 or mat2.ndim != 2:
        raise NotLowered("its factors are not dense matrices")
    if not self.dtype == mat1.dtype == mat2.dtype:  # torch refuses it as well
        raise RuntimeError(
            f"sampled_addmm of {self.dtype} with factors of {mat1.dtype} and {mat2.dtype}: it needs one dtype. Convert "
            f"the first operand, x.to({mat1.dtype}), or the factors"
        )
    return sampled(matrix(self), mat1, mat2, beta, alpha)
