"""Products of stored elements with rows of a dense matrix, and their derivatives.

With `row` and `column` the coordinates of each stored element:

    spmm    (rows, n)  = Σ over the elements of a row: element · dense[its column]
    sddmm   (stored,)  = left[its row] · right[its column], summed

Each is the derivative of the other, to any order, without the (stored × n) intermediate that plain indexing would
allocate. In a compiled graph the compiler fuses that intermediate away, so plain indexing is used there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from op_registry.records.dtypes import accumulation_dtype
from op_registry.records.own_function import OwnFunction
from op_registry.records.tracing import computed_at_once

aten = torch.ops.aten

# The dtypes of torch's kernels for sums of rows and sampled products; other dtypes use plain indexing.
_KERNEL_DTYPES = (torch.float32, torch.float64)


class RowColumn:
    """The coordinates of the stored elements of a matrix, and their order by row.

    row, column  of every stored element in storage order, int64 (stored,)
    rows         number of rows
    columns      number of columns
    in_order     whether elements are stored row by row
    ends         where rows start and end, if known (see :meth:`by_row`)
    """

    def __init__(
        self, row: Tensor, column: Tensor, rows: int, columns: int, *, in_order: bool, ends: Tensor | None = None
    ) -> None:
        # The coordinates in blocks of one row or column are expanded, and torch's kernels read contiguous memory.
        self.row, self.column = row.contiguous(), column.contiguous()
        self.rows, self.columns = rows, columns
        self._in_order = in_order
        self._ends = ends
        self._sorted: tuple[Tensor | None, Tensor] | None = None
        self._transposed: RowColumn | None = None

    @property
    def transposed(self) -> RowColumn:
        if self._transposed is None:
            self._transposed = RowColumn(self.column, self.row, self.columns, self.rows, in_order=False)
            self._transposed._transposed = self
        return self._transposed

    def by_row(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """The elements row by row.

        order    the permutation that sorts them by row; None if they are stored so
        columns  int64 (stored,), in that order
        ends     int64 (rows + 1,): where the elements of each row start and end, in that order
        """
        if self._sorted is None:
            order = None if self._in_order else self.row.argsort(stable=True)
            self._sorted = (order, self.column if order is None else self.column[order])
        if self._ends is None:
            counts = torch.zeros(self.rows + 1, dtype=torch.int64, device=self.row.device)
            self._ends = counts.scatter_add(0, self.row + 1, torch.ones_like(self.row)).cumsum(0)
        return (*self._sorted, self._ends)


def spmm(values: Tensor, dense: Tensor, coordinates: RowColumn) -> Tensor:
    """(rows, n) from values (stored,) and dense (columns, n) of one dtype; differentiable to any order."""
    if not _has_kernel(values, dense):
        sum_dtype = accumulation_dtype(values.dtype)
        terms = values.to(sum_dtype).unsqueeze(1) * dense.to(sum_dtype).index_select(0, coordinates.column)
        total = terms.new_zeros((coordinates.rows, dense.shape[1])).index_add(0, coordinates.row, terms)
        return total.to(values.dtype)
    return _Spmm.apply(values, dense, coordinates)


def sddmm(left: Tensor, right: Tensor, coordinates: RowColumn) -> Tensor:
    """(stored,) from left (rows, n) and right (columns, n) of one dtype; differentiable to any order."""
    if not _has_kernel(left, right):
        sum_dtype = accumulation_dtype(left.dtype)
        rows = left.to(sum_dtype).index_select(0, coordinates.row)
        terms = rows * right.to(sum_dtype).index_select(0, coordinates.column)
        return terms.sum(1).to(left.dtype)
    return _Sddmm.apply(left, right, coordinates)


def _has_kernel(*factors: Tensor) -> bool:
    supported = all(t.dtype in _KERNEL_DTYPES and t.device.type == "cpu" for t in factors)
    return supported and computed_at_once(*factors)


class _Context(Protocol):
    """What both functions save: their factors, and the coordinates."""

    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    coordinates: RowColumn

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def save_for_forward(self, *tensors: Tensor) -> None: ...


class _Spmm(OwnFunction):
    @staticmethod
    def forward(ctx: _Context, values: Tensor, dense: Tensor, coordinates: RowColumn) -> Tensor:
        ctx.save_for_backward(values, dense)
        ctx.save_for_forward(values, dense)
        ctx.coordinates = coordinates
        if 0 in (values.shape[0], coordinates.rows, dense.shape[1]):
            return dense.new_zeros((coordinates.rows, dense.shape[1]))
        order, columns, ends = coordinates.by_row()
        # A weighted sum of embeddings is a product with a sparse matrix, and twice as fast as torch's own product.
        weights = values if order is None else values[order]
        return aten._embedding_bag_forward_only(
            dense.contiguous(), columns, ends, False, 0, False, weights.contiguous(), True
        )[0]

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, dense = ctx.saved_tensors
        values_grad = sddmm(grad, dense, ctx.coordinates) if ctx.needs_input_grad[0] else None
        dense_grad = spmm(values, grad, ctx.coordinates.transposed) if ctx.needs_input_grad[1] else None
        return values_grad, dense_grad, None

    @staticmethod
    def jvp(ctx: _Context, values_tangent: Tensor | None, dense_tangent: Tensor | None, _: None) -> Tensor:
        return _product_rule(spmm, values_tangent, dense_tangent, ctx)


class _Sddmm(OwnFunction):
    @staticmethod
    def forward(ctx: _Context, left: Tensor, right: Tensor, coordinates: RowColumn) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)
        ctx.coordinates = coordinates
        stored = coordinates.row.shape[0]
        if 0 in (stored, coordinates.rows, coordinates.columns, left.shape[1]):
            return left.new_zeros(stored)
        # The gradient of the weighted sum of embeddings with respect to its weights; elements may be in any order.
        return aten._embedding_bag_per_sample_weights_backward(
            left.contiguous(), right.contiguous(), coordinates.column, coordinates.column[:1], coordinates.row, 0
        )

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, right = ctx.saved_tensors
        left_grad = spmm(grad, right, ctx.coordinates) if ctx.needs_input_grad[0] else None
        right_grad = spmm(grad, left, ctx.coordinates.transposed) if ctx.needs_input_grad[1] else None
        return left_grad, right_grad, None

    @staticmethod
    def jvp(ctx: _Context, left_tangent: Tensor | None, right_tangent: Tensor | None, _: None) -> Tensor:
        return _product_rule(sddmm, left_tangent, right_tangent, ctx)


def _product_rule(
    product: Callable[[Tensor, Tensor, RowColumn], Tensor],
    first_tangent: Tensor | None,
    second_tangent: Tensor | None,
    ctx: _Context,
) -> Tensor:
    """The tangent of a bilinear product: the tangent of each factor times the other factor."""
    first, second = ctx.saved_tensors
    terms = [product(first_tangent, second, ctx.coordinates)] if first_tangent is not None else []
    terms += [product(first, second_tangent, ctx.coordinates)] if second_tangent is not None else []
    return sum(terms[1:], terms[0])
