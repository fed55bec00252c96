"""Matrix products with sparse storage.

Law: as matmul.py has it. The tuples whose factors are both valid are among those whose factors are both stored, so
nothing else is looked at. Sparse by dense is dense, as is dense by sparse; sparse by sparse is sparse; a product of
dense factors that is added to a sparse tensor is computed in that one's places alone (torch's `sampled_addmm`).

Where both operands are stored densely but for one, and it has dense dimensions of its own, packed.py goes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from op_registry.authoring import (
    BY_COLUMN,
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
    layout_without_blocks,
    map_tensors,
    ravel,
    sddmm,
    spmm,
    transposed,
    unravel,
)
from op_registry.ops.contractions import matmul
from op_registry.ops.contractions.matmul import with_bias

aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------- what they are made of


def placed(x: Sparse, batched: bool) -> RowColumn:
    """Where the elements of `x` (*batch, rows, columns) are in one long matrix: batches of rows one below the other.

    `batched`: the columns of each batch are columns of their own, one behind the other.
    """
    return x.pattern.remembered(("placed", batched), lambda: _placed(x, batched))


def _placed(x: Sparse, batched: bool) -> RowColumn:
    pattern, places = x.pattern, x.pattern.places()
    *batch, rows, columns = pattern.sizes
    number = math.prod(batch)
    row = ravel(places[:-1], pattern.sizes[:-1])
    column = ravel((*places[:-2], places[-1]), (*batch, columns)) if batched else places[-1]
    in_order = pattern.block is None and pattern.layout not in BY_COLUMN
    ends = pattern.pieces[0] if in_order and len(pattern.pieces) > 1 else None
    ends = ends if ends is None or ends.dtype is torch.int64 else ends.to(torch.int64)
    return RowColumn(row, column, number * rows, columns * (number if batched else 1), in_order=in_order, ends=ends)


def matrix(x: Any, least: int = 2) -> Sparse:
    """A sparse operand without dense dimensions; NotLowered for others."""
    if not isinstance(x, Sparse) or x.dense_sizes or x.ndim < least or 0 in x.shape:
        raise NotLowered("its sparse operand is no matrix, or has dense dimensions, or nothing in it")
    return x


def checked(a: Any, b: Any) -> None:
    """Operands that torch would multiply, and with which it would not do anything else first."""
    if (
        a.dtype is not b.dtype
        or a.shape[-1] != b.shape[-2]
        or (a.ndim == 3 and b.ndim == 3 and a.shape[0] != b.shape[0])
    ):
        raise NotLowered(f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype} are no factors")
    if autocast_on(a.device):
        raise NotLowered("autocast chooses another dtype")
    if a.dtype is torch.bool:
        raise NotLowered("torch refuses it")


def sparse_by_dense(a: Sparse, b: Dense) -> Dense:
    """(*batch, m, k) by (k, n), or (batch, m, k) by (batch, k, n)."""
    if b.ndim not in (2, a.ndim) or a.ndim > 3:
        raise NotLowered("its operands are broadcast over batches")
    checked(a, b)
    where, flat = placed(a, batched=b.ndim == 3), a.flat
    columns = b.shape[-1]
    shape = (*a.shape[:-1], columns)
    data = spmm(flat.filled(0), b.filled(0).flatten(0, -2), where).reshape(shape)
    if b.validity is None or b.shape[-1] == 0:
        some = Segments(a, (a.pattern.ndim - 1,)).count(flat) > 0
        return Dense(data, as_int8(some).reshape(*a.shape[:-1], 1))
    counts = as_int8(b.full_validity).to(torch.float32).flatten(0, -2)  # type: ignore[arg-type]
    met = spmm(as_int8(full_mask(flat)).to(torch.float32), counts, where)
    return Dense(data, as_int8(met > 0.5).reshape(shape))


def dense_by_sparse(a: Dense, b: Sparse) -> Dense:
    """(m, k) by (k, n), by transposition."""
    if a.ndim != 2 or b.ndim != 2:
        raise NotLowered("its operands are broadcast over batches")
    checked(a, b)
    where, flat = placed(b, batched=False).transposed, b.flat
    data = spmm(flat.filled(0), a.filled(0).t(), where).t().contiguous()
    if a.validity is None or a.shape[0] == 0:
        some = Segments(b, (0,)).count(flat) > 0
        return Dense(data, as_int8(some).reshape(1, -1))
    counts = as_int8(a.full_validity).to(torch.float32)  # type: ignore[arg-type]
    met = spmm(as_int8(full_mask(flat)).to(torch.float32), counts.t(), where)
    return Dense(data, as_int8(met > 0.5).t())


def sparse_by_sparse(a: Sparse, b: Sparse) -> Sparse:
    """Each element of `a` by the elements in the row of `b` that its column names, summed where they meet.

    Batches are one product of block-diagonal matrices: an element meets the row of its own batch.
    """
    if a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2]:
        raise NotLowered("its operands are broadcast over batches")
    if being_traced(a.values.data):
        raise NotLowered("how many products there will be is not known while tracing")
    checked(a, b)
    left, right, batched = a.flat, b.flat, a.ndim > 2
    where = placed(a, batched)
    order, columns, ends = placed(b, batched).by_row()
    each = ends.diff()[where.column]  # partners of every element of `a`
    source = torch.repeat_interleave(each)
    before = ends[where.column] - (each.cumsum(0) - each)
    partner = before[source] + torch.arange(source.shape[0], device=a.device)
    row, column = where.row[source], columns[partner]
    partner = partner if order is None else order[partner]
    validity = None
    if left.validity is not None or right.validity is not None:
        validity = intersect(as_int8(full_mask(left))[source], as_int8(full_mask(right))[partner])
    products = Dense(left.filled(0)[source] * right.filled(0)[partner], validity)
    places = (*unravel(row, a.shape[:-1]), column % b.shape[-1]) if batched else (row, column)
    return coalesce(layout_without_blocks(a.pattern.layout), places, products, (*a.shape[:-1], b.shape[-1]))


def product(a: Any, b: Any) -> Dense | Sparse:
    """A product of which a factor is sparse."""
    if isinstance(a, Sparse) and isinstance(b, Sparse):
        return sparse_by_sparse(matrix(a), matrix(b))
    if isinstance(a, Sparse):
        return sparse_by_dense(matrix(a), b)
    return dense_by_sparse(a, matrix(b))


def sampled(self: Sparse, a: Dense, b: Dense, beta: Number, alpha: Number) -> Sparse:
    """``beta * self + alpha * a @ b`` in the places of `self` alone: where that is absent, the sum is invalid."""
    checked(a, b)
    if self.shape != (a.shape[0], b.shape[1]) or a.shape[1] == 0 or self.dtype is not a.dtype:
        raise NotLowered("its operands are broadcast, or of different dtypes, or nothing is contracted")
    where, flat = placed(self, batched=False), self.flat
    found = sddmm(a.filled(0), b.filled(0).t(), where)
    data = alpha * found + (beta * flat.data if beta != 0 else 0)
    validity = None
    if a.validity is not None or b.validity is not None:
        met = [as_int8(full_mask(x)).expand(x.shape).to(torch.float32) for x in (a, b)]
        validity = as_int8(sddmm(met[0], met[1].t(), where) > 0.5)
    return self.folded(Dense(data, validity).masked_by(flat.full_validity))


# ---------------------------------------------------------------------------------------------------------- operators


def rounded_once(run: Callable[..., Any]) -> Callable[..., Any]:
    """A product of half-precision operands in the precision in which torch sums them, rounded at its end."""

    @functools.wraps(run)
    def wide(*args: Any, **kwargs: Any) -> Any:
        dtypes: set[torch.dtype] = set()
        map_tensors(lambda r: dtypes.add(r.dtype), [*args, *kwargs.values()], (Dense, Sparse))
        (dtype,) = dtypes if len(dtypes) == 1 else (None,)
        if dtype is None or accumulation_dtype(dtype) is dtype or autocast_on(_device_of(args)):
            return run(*args, **kwargs)
        precise = accumulation_dtype(dtype)
        positional, named = map_tensors(lambda r: cast(r, precise), (list(args), list(kwargs.items())), (Dense, Sparse))
        return map_tensors(lambda r: cast(r, dtype), run(*positional, **dict(named)), (Dense, Sparse))

    return wide


def _device_of(args: Any) -> torch.device:
    found: list[torch.device] = []
    map_tensors(lambda r: found.append(r.device), list(args), (Dense, Sparse))
    return found[0]


def cast(record: Any, dtype: torch.dtype) -> Any:
    """A record in another dtype."""
    if isinstance(record, Sparse):
        return record.like(cast(record.values, dtype))
    return record.like(record.data.to(dtype))


def matrix_dims(op: OpOverload) -> int:
    """How many dimensions the factors of mm, addmm, bmm and baddbmm have."""
    return 3 if "bmm" in op._schema.name else 2


@rounded_once
def mm(op: OpOverload, self: Any, mat2: Any, *out_dtype: torch.dtype) -> Any:
    if out_dtype or op._schema.name == "aten::_int_mm" or {self.ndim, mat2.ndim} != {matrix_dims(op)}:
        raise NotLowered("its result has a dtype of its own, or torch refuses it")
    return product(self, mat2)


@rounded_once
def matmul_with_sparse(op: OpOverload, self: Any, other: Any) -> Any:
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
def linear_with_sparse(op: OpOverload, input: Any, weight: Any, bias: Any = None) -> Any:
    if weight.ndim != 2 or not isinstance(input, Sparse) or not isinstance(weight, Dense) or isinstance(bias, Sparse):
        raise NotLowered("its weight is no matrix, or its weight or bias is sparse")
    result = sparse_by_dense(matrix(input), transposed(weight))
    return _summed(result.data, result, bias)


@rounded_once
def addmm_with_sparse(
    op: OpOverload,
    self: Any,
    mat1: Any,
    mat2: Any,
    *out_dtype: torch.dtype,
    beta: Number = 1,
    alpha: Number = 1,
) -> Any:
    if out_dtype:
        raise NotLowered("its result has a dtype of its own")
    if not (self.dtype.is_floating_point or self.dtype.is_complex) and any(type(s) is float for s in (beta, alpha)):
        raise NotLowered("torch rounds the fractions by which it is to multiply integers")
    if {mat1.ndim, mat2.ndim} != {matrix_dims(op)}:
        raise NotLowered("torch refuses it")
    if isinstance(self, Sparse):
        if not isinstance(mat1, Dense) or not isinstance(mat2, Dense) or beta == 0 or mat1.ndim != 2 or mat2.ndim != 2:
            raise NotLowered("what it is added to is sparse, and takes no part or its factors are no dense matrices")
        return sampled(matrix(self), mat1, mat2, beta, alpha)
    result = product(mat1, mat2)
    if not isinstance(result, Dense) or self.dtype is not result.dtype:
        raise NotLowered("a sparse product is added to a dense tensor, or one of another dtype")
    return _summed(alpha * result.data, result, self, beta)


def _summed(data: Tensor, result: Dense, bias: Dense | None, beta: Number = 1) -> Dense:
    if bias is not None and beta != 0:
        torch.broadcast_to(torch.empty(bias.shape, device="meta"), data.shape)  # raises torch's own error
        data = data + (bias.filled(0) if beta == 1 else beta * bias.filled(0))
    return with_bias(data, result.full_validity, bias, beta)


# Refused on torch's own sparse tensors, in which what is absent is zero. Here it is invalid, and all is well defined.
@matmul.sampled_addmm.lowering(Sparse)
@rounded_once
def sampled_by_sparse(op: OpOverload, self: Any, mat1: Any, mat2: Any, *, beta: Number = 1, alpha: Number = 1) -> Any:
    if not isinstance(mat1, Dense) or not isinstance(mat2, Dense) or mat1.ndim != 2 or mat2.ndim != 2:
        raise NotLowered("its factors are no dense matrices")
    return sampled(matrix(self), mat1, mat2, beta, alpha)
